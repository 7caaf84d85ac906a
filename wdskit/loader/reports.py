"""What a loader tells of itself while it runs: lines of the log, lines of a file, and a port."""

from __future__ import annotations

import json
import logging
import time
import weakref
from pathlib import Path

from wdskit.errors import PipelineError
from wdskit.files import append_lines, make_folders
from wdskit.loader.stats import Stats
from wdskit.pipeline.stats_spec import StatsSpec

logger = logging.getLogger(__name__)

MAX_PORT = 65_535


class Reports:
    """Reports every so many steps on what was since the last report.

    Args:
        stats: Of the loader.
        spec: What is wanted.
        owner: With which the port is given back.

    Raises:
        PipelineError: The port cannot be had, or the file cannot be written.
    """

    def __init__(self, stats: Stats, spec: StatsSpec, *, owner: object) -> None:
        self._stats = stats
        self._every = spec.every
        self._next = spec.every
        self._path = None if spec.file is None else path_of(spec.file, stats.rank)
        if self._path is not None:
            _try(self._path)
        if spec.port is not None:
            from wdskit.loader.serving import serve  # who wants no port needs no server

            weakref.finalize(owner, serve(stats, spec.host, _port_of(spec.port, stats.rank)))

    def step(self) -> None:
        """The consumer has received something: report if it is time."""
        steps = self._stats.steps
        if steps < self._next:
            return
        self._next = steps - steps % self._every + self._every
        found = self._stats.stats("report")
        logger.info("%s", found.line())
        if self._path is not None:
            try:
                append_lines(self._path, [json.dumps({"time": round(time.time(), 3), **found.to_json()})])
            except OSError as err:  # hours into a training: what it tells of itself is worth less than that
                logger.warning("stats: %s cannot be written any more: %s", self._path, err)
                self._path = None
        self._stats.begin_report()


def path_of(file: str, rank: int) -> Path:
    """Where a rank reports: `stats.jsonl` with its number is `stats-rank00003.jsonl`."""
    path = Path(file)
    return path.with_name(f"{path.stem}-rank{rank:05d}{path.suffix}")


def _try(path: Path) -> None:
    """Find out now whether a file can be written."""
    try:
        make_folders(path.parent)
        append_lines(path, [])
    except OSError as err:
        msg = f"stats: {path} cannot be written: {err.strerror or err}."
        raise PipelineError(f"{msg}\n  Choose another for loader.stats.file, or leave it out.") from err


def _port_of(port: int, rank: int) -> int:
    if port and port + rank > MAX_PORT:
        msg = f"stats: rank {rank} would listen at port {port + rank}, and there are none above {MAX_PORT}."
        raise PipelineError(f"{msg}\n  Choose a lower one for loader.stats.port.")
    return port + rank if port else 0
