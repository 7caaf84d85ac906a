"""Build the extension module, with the stable ABI; exit with one line if a header is missing."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# The stable ABI has the buffer protocol since Python 3.11. Free-threaded builds have no stable ABI.
STABLE = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")
NEEDS = (
    "wdskit-native needs a C compiler and the headers of libjpeg-turbo (Debian: apt install gcc libjpeg-dev; "
    "Fedora: dnf install gcc libjpeg-turbo-devel; macOS: brew install jpeg-turbo). wdskit works without this package."
)


class Build(build_ext):
    """The build command, with a check that a program with libjpeg's header compiles."""

    def build_extensions(self) -> None:
        """See `build_ext.build_extensions`. Exits with the list of needed packages if the check fails."""
        probe = Path(self.build_temp) / "probe.c"
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("#include <stdio.h>\n#include <jpeglib.h>\n")
        try:
            self.compiler.compile([str(probe)], output_dir=self.build_temp)
        except CompileError:
            sys.exit(NEEDS)
        super().build_extensions()


setup(
    ext_modules=[
        Extension(
            "wdskit_native",
            [f"src/{name}.c" for name in ("module", "images", "resize", "samples", "scratch")],
            depends=[f"src/{name}.h" for name in ("images", "resize", "samples", "scratch")],
            libraries=["jpeg"],
            # No fused multiply-add: torch rounds twice.
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
            py_limited_api=STABLE,
        )
    ],
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
