"""The command line: one command per file.

`--help` loads the modules of all commands, so a command imports slow modules inside its function. Exit codes: 0 for
success, 1 for an error with a message or a finding, 2 for a wrong command line or a command that could not start its
check (`verify`, `config`), 130 for Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Annotated

import typer

from wdskit import __version__
from wdskit.cli.bench import bench_command
from wdskit.cli.cat import cat_command
from wdskit.cli.config import app as config_app
from wdskit.cli.console import print_error
from wdskit.cli.index import index_command
from wdskit.cli.info import info_command
from wdskit.cli.options import Command, Group
from wdskit.cli.pack import pack_command
from wdskit.cli.plan import plan_command
from wdskit.cli.reshard import reshard_command
from wdskit.cli.split import split_command
from wdskit.cli.verify import verify_command
from wdskit.cli.view import view_command
from wdskit.errors import StorageError, WdskitError
from wdskit.native import describe_native

# Help is plain text: it is readable in logs and pipes, and brackets are not read as markup.
app = typer.Typer(
    name="wdskit",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(*, wanted: bool) -> None:
    if wanted:
        print(f"wdskit {__version__}, {describe_native()}")
        raise typer.Exit


@app.callback()
def _wdskit(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version, and whether its native code is used.",
        ),
    ] = False,
) -> None:
    """Pack image and JSON samples into WebDataset shards and feed them to DDP training."""


app.command("pack", cls=Command, context_settings={"allow_extra_args": True})(pack_command)
app.command("index", cls=Command)(index_command)
app.command("info", cls=Command)(info_command)
app.command("reshard", cls=Command)(reshard_command)
app.command("split", cls=Command)(split_command)
app.command("plan", cls=Command)(plan_command)
app.command("bench", cls=Command)(bench_command)
app.command("verify", cls=Command)(verify_command)
app.command("cat", cls=Command)(cat_command)
app.command("view", cls=Command)(view_command)
app.add_typer(config_app, name="config")


def main() -> None:
    """Run the command line of this process and exit."""
    # Names that the terminal's encoding lacks are shown as escapes instead of ending the command.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # not a text file, as in tests
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:  # the caller closed it (`>&-`)
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), "r" if name == "stdin" else "w"))
    code = _run()
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has ended (`| head`)
        _discard_output()
    except OSError as err:
        code = _report_os_error(err)
    sys.exit(code)


def _discard_output() -> None:
    """Send stdout to the null device, so that Python does not fail at exit when it flushes the buffered output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_os_error(err: OSError) -> int:
    """Print on stderr the file of the error, or that the output cannot be written, and return exit code 1. In the
    second case, the buffered output of stdout is discarded.
    """
    if err.filename is None:
        _discard_output()
    what = "the output cannot be written" if err.filename is None else os.fsdecode(err.filename)
    print_error(StorageError(f"{what}: {err.strerror or err}."))
    return 1


def _run() -> int:
    """Run the command in `sys.argv` and return the exit code.

    A WdskitError, Ctrl-C, and an OSError for a full or broken disk become exit codes. An unexpected error is raised.
    """
    try:
        typer.main.get_command(app)(prog_name="wdskit")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except WdskitError as err:
        with contextlib.suppress(BrokenPipeError):
            print_error(err)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as err:
        is_barred = err.filename is not None and err.errno in {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}
        if not is_barred and err.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}:
            raise
        return _report_os_error(err)
    return 0
