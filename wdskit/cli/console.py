"""What the commands share: consoles, errors, numbers and names as people read them, a progress bar."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from wdskit import text as wording

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 100
"""Columns of a table that goes to a file or a pipe, where COLUMNS says nothing."""


escape = wording.printable
format_bytes = wording.format_bytes
format_count = wording.format_count


def make_console(*, stderr: bool = False) -> Console:
    """A rich console for tables and bars: colours on a terminal only and never with NO_COLOR; no markup, no emoji."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def escape_lines(text: str) -> str:
    """The text with its line ends kept and everything else that a terminal could act on shown."""
    return "\n".join(map(escape, text.split("\n")))


def print_error(error: BaseException) -> None:
    """The error's message on stderr, plain, its lines kept."""
    print(escape_lines(str(error)), file=sys.stderr)


def print_json(value: object) -> None:
    """One JSON document on one line of stdout, in ASCII, so that names cannot reach the terminal raw."""
    print(json.dumps(value))


def plural(count: int, noun: str) -> str:
    """A number and what it counts: `1 shard`, `1,281 shards`, `2 classes`."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{format_count(count)} {noun}{ending}"


def split_kinds(text: str | None) -> list[str]:
    """`dali,timm` as a list; empty for nothing."""
    return [name.strip() for name in text.split(",")] if text else []


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """One fact a line."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for fact in facts:
        table.add_row(*fact)
    return table


def ignored_note(num_ignored: int) -> str:
    """The note on members that belong to no sample."""
    return f"Note: {plural(num_ignored, 'member')} in no sample (`wdskit ls SHARD --members` lists all)."


@contextlib.contextmanager
def show_bytes(title: str) -> Iterator[Callable[[int, int | None], None]]:
    """A bar with MB/s and the time left on stderr while the block runs, where that is a terminal.

    Yields:
        The function to tell: bytes so far, bytes in all or None where that is unknown.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = make_console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escape(title), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def show_steps() -> Iterator[Callable[[str, int, int], None]]:
    """A bar with the time left on stderr while the block runs, where that is a terminal.

    Yields:
        The function to tell: what comes next, steps so far, steps in all.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = make_console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=escape(what), completed=done, total=total)
