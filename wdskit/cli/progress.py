"""The bar of `pack` and `reshard`, and what they say where Ctrl-C stops them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from wdskit.cli.console import format_bytes, format_count, make_console

if TYPE_CHECKING:
    from wdskit.packing.row import Progress, Tell

_TELL_S = 0.1


@contextlib.contextmanager
def told_when_stopped() -> Iterator[None]:
    """A line on stderr where Ctrl-C ends the block."""
    try:
        yield
    except KeyboardInterrupt:
        print("Stopped. What has its name is whole, and the same command goes on with it.", file=sys.stderr)
        raise


@contextlib.contextmanager
def show_progress() -> Iterator[Tell]:
    """A bar with samples/s, MB/s and the time left on stderr while the block runs, where that is a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn

    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[facts]}"))
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as bar:
        yield _Shown(bar) if console.is_terminal else _say_nothing


class _Shown:
    """Tells a bar how far packing is, a few times a second. Each stage has its own bar."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._stage = ""
        self._next = 0.0

    def __call__(self, now: Progress) -> None:
        seconds = time.monotonic()
        if now.stage != self._stage:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._task = self._bar.add_task(now.stage, total=now.total_samples, facts="")
            self._stage, self._start = now.stage, seconds
        elif seconds < self._next and now.num_samples != now.total_samples:
            return
        self._next = seconds + _TELL_S
        done, facts = now.num_samples, _facts(now, seconds - self._start)
        self._bar.update(self._task, completed=done, facts=facts, refresh=done == now.total_samples)


def _facts(now: Progress, seconds: float) -> str:
    """`1,200 of 40,000  812 samples/s  95.1 MB/s  0:00:48 left`, as far as that is known."""
    facts = [format_count(now.num_samples)]
    if now.total_samples is not None:
        facts[0] += f" of {format_count(now.total_samples)}"
    if seconds > 0 and now.num_samples:
        facts.append(f"{format_count(round(now.num_samples / seconds))} samples/s")
        if now.num_bytes:
            facts.append(f"{format_bytes(now.num_bytes / seconds)}/s")
        if now.total_bytes is not None:
            left = seconds * (now.total_bytes - now.num_bytes) / now.num_bytes
            facts.append(f"{timedelta(seconds=round(left))} left")
    return "  ".join(facts)


def _say_nothing(_: Progress) -> None:
    """Progress where nobody looks."""
