"""What is measured: the parts of the benchmark, and who takes part in each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peers.catalogue import DECODERS, Contestant, Setting
from peers.job import Job

PARTS = ("bytes", "small", "images")


@dataclass
class Entry:
    """A contestant in one of its settings: a line of a table.

    Args:
        contestant: Who.
        setting: Its workers, threads and chain.
        rounds: A result a round.
        problem: Why there are no more, or what was wrong with them.
    """

    contestant: Contestant
    setting: Setting = field(default_factory=Setting)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""

    @property
    def title(self) -> str:
        """In the table."""
        return ", ".join(filter(None, (self.contestant.title, self.setting.label)))

    @property
    def key(self) -> str:
        """In the JSON."""
        return " ".join(filter(None, (self.contestant.name, self.setting.label)))


@dataclass(frozen=True)
class Part:
    """One table.

    Args:
        key: In the JSON.
        title: Above the table.
        settings: Which of a contestant's settings: "alone" or "images".
        job: What is common to all jobs.
        quick: Whether the first setting of each will do.
    """

    key: str
    title: str
    settings: str
    job: Job
    quick: bool = False

    def entries(self, contestants: list[Contestant]) -> list[Entry]:
        """Everyone who takes part, in each of his settings."""
        return [
            Entry(contestant, setting)
            for contestant in contestants
            for setting in getattr(contestant, self.settings)[: 1 if self.quick else None]
        ]


def parts(names: list[str], folder: str, *, quick: bool, seconds: float) -> list[Part]:
    """The tables of some parts; `quick` ones are so small that their numbers say nothing."""
    found: list[Part] = []
    if "bytes" in names:
        for size, num in ((3_000, 16_384), (100_000, 2_048)):
            num = 512 if quick else num
            job = Job("run", "bytes", f"{folder}/bytes-{size}-{num}", num, size, 16 if quick else 64, seconds=seconds)
            title = f"bytes only, {size // 1000} kB, batches of {job.batch}, one process"
            found.append(Part(f"bytes-{size}", title, "alone", job, quick))
    if "small" in names:
        num = 1_024 if quick else 16_384
        job = Job("run", "small", f"{folder}/small-{num}", num, 2_000, 32 if quick else 256, seconds=seconds)
        found.append(Part("small", f"2 kB and JSON, batches of {job.batch}, one process", "alone", job, quick))
    if "images" in names:
        num = 192 if quick else 2_048
        for dtype in ("uint8",) if quick else ("uint8", "float32"):
            batch = 8 if quick else 64
            job = Job("run", "images", f"{folder}/images-{num}", num, 0, batch, dtype, seconds=seconds)
            title = f"photographs to batches of {batch} as {dtype}, {DECODERS} decoders"
            found.append(Part(f"images-{dtype}", title, "images", job, quick))
    return found
