"""Functions that all commands share: consoles, errors, formatted numbers and names, tables, progress bars."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from wdskit import text as wording

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from wdskit.packing.row import OnProgress

PIPE_WIDTH = 100
"""Width in characters of a table that goes to a file or a pipe, if COLUMNS is not set."""

_REFRESH_S = 0.1
_LOG_EVERY_S = 60

escape = wording.printable
format_bytes = wording.format_bytes
format_count = wording.format_count
plural = wording.plural


def make_console(*, stderr: bool = False) -> Console:
    """Return a rich console on stdout or stderr that prints `[...]` and `:name:` as plain text."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def escape_lines(text: str) -> str:
    """Return a text with escapes in place of control characters. Newlines stay."""
    return "\n".join(map(escape, text.split("\n")))


def print_error(error: BaseException) -> None:
    """Print the message of an error on stderr. Characters that a terminal would act on are shown as escapes."""
    print(escape_lines(str(error)), file=sys.stderr)


def print_json(value: object) -> None:
    """Print one JSON document on one line of stdout. Dataclasses become objects, paths become text, and infinity and
    NaN, which JSON lacks, become null.

    The output is ASCII, so that the terminal does not act on characters in names.
    """
    text = json.dumps(value, default=lambda part: str(part) if isinstance(part, Path) else vars(part))
    print(json.dumps(json.loads(text, parse_constant=lambda _: None)))


def by_name(rows: Iterable[Any]) -> dict[str, dict[str, object]]:
    """Return {row.name: dict of the row's other attributes}. Rows are dataclasses with different names."""
    return {row.name: {key: value for key, value in vars(row).items() if key != "name"} for row in rows}


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables on stdout, with an empty line between them."""
    console = make_console()
    for number, table in enumerate(tables):
        if number:
            print()
        print(_render(console, table))


def _render(console: Console, table: Table) -> str:
    """Return a table as text. Spaces at line ends are removed if `console` is not a terminal."""
    with console.capture() as text:
        console.print(table)
    lines = text.get().rstrip("\n").split("\n")
    return "\n".join(lines if console.is_terminal else map(str.rstrip, lines))


def details_table(details: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """Make a table with one line for each (name, value), under `title` if it is not None."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_edge=False, show_header=False, title_justify="left")
    table.title = None if title is None else Text(escape(title), style="bold")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for detail in details:
        table.add_row(*map(escape, detail))
    return table


def numbers_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, texts: Collection[str] = ()) -> Table:
    """Make a table. The first column has names, the other columns have numbers, aligned right.

    Columns whose titles are in `texts` have text, aligned left. Each row has one cell for each of `titles`. If the
    table is too wide, names and texts are broken into several lines.
    """
    from rich import box
    from rich.table import Table

    name, *others = titles
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column(name, style="bold", overflow="fold")
    for title in others:
        if title in texts:
            table.add_column(title, overflow="fold")
        else:
            table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def print_summary(details: Iterable[tuple[str, str]], notes: Iterable[str]) -> None:
    """Print what a run wrote: one (name, value) per line, then the notes. A closed pipe (`| head`) is ignored."""
    rows = [*details]
    width = max(len(name) for name, _ in rows)
    with contextlib.suppress(BrokenPipeError):
        for name, value in rows:
            print(f"{name:{width}}  {escape(value)}")
        for note in notes:
            print(escape(note))


def ignored_note(num_ignored: int) -> str:
    """Return the note that `num_ignored` members of a shard belong to no sample."""
    return f"Note: {plural(num_ignored, 'member')} in no sample (`tar tf SHARD` lists all members)."


Show: TypeAlias = Callable[[str, int, int | None], None]
"""Takes the name of the running step, the amount done, and the whole amount (None if unknown)."""


@contextlib.contextmanager
def show_progress(form: Callable[[int], str], *, rate: str | None = None) -> Iterator[Show]:
    """Show a progress bar on stderr while the `with` block runs. If stderr is not a terminal, print a line once a
    minute instead.

    Args:
        form: Turns an amount into text.
        rate: The text between the amount in a second and `/s`; None shows no rate.
    """
    from rich.progress import BarColumn, Progress, TextColumn

    console, start_s = make_console(stderr=True), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[text]}"))
    bar = Progress(*columns, console=console, transient=True, expand=True)
    task = bar.add_task("", total=None, text="")
    next_s, shown = start_s + (0 if console.is_terminal else _LOG_EVERY_S), ""

    def show(step: str, done: int, total: int | None) -> None:
        nonlocal next_s, shown
        now_s = time.monotonic()
        is_end = console.is_terminal and (step != shown or done == total)
        if now_s < next_s and not is_end:
            return
        seconds = now_s - start_s or 1e-9
        text = form(done) if total is None else f"{form(done)} of {form(total)}"
        text += "" if rate is None else f"  {form(round(done / seconds))}{rate}/s"
        if done and total is not None:
            text += f"  {timedelta(seconds=round(seconds * (total - done) / done))} left"
        if console.is_terminal:
            next_s, shown = now_s + _REFRESH_S, step
            bar.update(task, description=escape(step), completed=done, total=total, text=escape(text), refresh=is_end)
        else:
            next_s = now_s + _LOG_EVERY_S
            print(escape(f"{step}: {text}"), file=sys.stderr, flush=True)

    # Entered on a terminal only: rich before 14.3 prints an empty line after a disabled bar.
    with bar if console.is_terminal else contextlib.nullcontext():
        yield show


show_steps = functools.partial(show_progress, format_count)
"""Shows the progress of a run of equal steps."""


@contextlib.contextmanager
def show_bytes(title: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show the progress of reading as `show_progress` does. `title` is the name of the step.

    Yields:
        A function to call with the number of bytes so far and the total number of bytes (None if unknown).
    """
    with show_progress(format_bytes, rate="") as show:
        yield functools.partial(show, title)


@contextlib.contextmanager
def show_packing() -> Iterator[OnProgress]:
    """Show the progress of each stage of packing as `show_progress` does. After Ctrl-C, print how packing continues,
    and raise KeyboardInterrupt again.

    Yields:
        A function to call with the stage, the number of samples so far, and of all samples (None if unknown).
    """
    try:
        with show_progress(format_count, rate=" samples") as show:
            yield show
    except KeyboardInterrupt:
        print(
            "Stopped. Every file with its final name is complete, and the same command continues from there.",
            file=sys.stderr,
        )
        raise
