"""Build the optional C extension `wdskit._native`. All other settings are in pyproject.toml."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

# The stable ABI has the buffer protocol since Python 3.11. Free-threaded builds have no stable ABI.
STABLE = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")

for left in Path("build").glob("lib*"):  # setuptools would also package the modules of an earlier version
    shutil.rmtree(left)

setup(
    ext_modules=[
        Extension(
            "wdskit._native",
            sorted(map(str, Path("native").glob("*.c"))),
            depends=sorted(map(str, Path("native").glob("*.h"))),
            libraries=["jpeg"],
            # No fused multiply-add: torch rounds twice.
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
            py_limited_api=STABLE,
            optional=True,  # without a compiler or libjpeg-turbo's headers, wdskit is installed without it
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
