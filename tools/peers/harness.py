"""Runs a contestant: an epoch to warm up, in which memory is sampled, then whole epochs that are measured."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from peers import measure
from peers.job import Job
from peers.tally import Tally

Batch = tuple[Any, Any]
"""Images and labels, or a list of bytes and their JSON documents (None without)."""

Epoch = Callable[[], Iterable[Batch]]
"""What `open_` of a contestant returns: each call gives the batches of one more epoch."""

PSS_SAMPLES = 8
EDGE = 6  # the part of an epoch's batches at either end that the rate of image batches leaves out, as 1/EDGE


@dataclass
class Measured:
    """One epoch."""

    first: float = 0.0
    last: float = 0.0
    cpu: float = 0.0
    middle_s: float = 0.0
    middle_samples: int = 0
    tally: dict[str, Any] = field(default_factory=dict)


def main(name: str, text: str) -> None:
    """Do a job, as JSON, with a contestant. What packages print goes to stderr; the result alone to stdout."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = importlib.import_module(f"peers.{name}")
    imported = time.monotonic()
    job = Job(**json.loads(text))
    result: dict[str, Any] = {}
    if job.mode == "prepare":
        peer.prepare(job)
    else:
        result = run(job, peer.open_(job), imported)
        result["versions"] = {package: version(package) for package in peer.PACKAGES}
    stdout.write(json.dumps(result) + "\n")
    stdout.close()
    sys.stderr.flush()
    measure.end_below()
    os._exit(0)  # what a peer does at its end is no part of this, and some hang there


def run(job: Job, epoch: Epoch, imported: float) -> dict[str, Any]:
    """Measure."""
    memory: list[float] = []
    every = max(job.steps // PSS_SAMPLES, 1)

    def sample_memory(step: int) -> None:
        if step % every == every - 1:
            memory.append(measure.pss_mb())

    warm = one_epoch(job, epoch, sample_memory, digests=True)
    epochs: list[Measured] = []
    start, cpu = time.monotonic(), measure.cpu_s()
    while not epochs or epochs[-1].last - start < job.seconds:
        epochs.append(one_epoch(job, epoch))
    cpu_s = measure.cpu_s() - cpu
    memory.append(measure.pss_mb())
    samples: int = sum(one.tally["samples"] for one in epochs)
    return {
        "samples": samples,
        "epochs": len(epochs),
        "cpu_ms": cpu_s / samples * 1000,
        "samples_per_s": rate(job, epochs, start),
        "first_s": warm.first - imported,
        "start_s": warm.first - job.launched,
        "next_epoch_s": epochs[0].first - warm.last,
        "pss_mb": max(memory),
        "tallies": [one.tally for one in [warm, *epochs]],
    }


def rate(job: Job, epochs: list[Measured], start: float) -> float:
    """Samples a second: of all epochs, or for images with workers or threads without each epoch's ends.

    Decoders stand still while an epoch drains. Over an epoch of a million images that is nothing, over these few it
    is not, so it is left out; memory that only reads can be read in advance, so there it must not be.
    """
    if job.kind == "images":
        return sum(one.middle_samples for one in epochs) / sum(one.middle_s for one in epochs)
    samples: int = sum(one.tally["samples"] for one in epochs)
    return samples / (epochs[-1].last - start)


def one_epoch(
    job: Job, epoch: Epoch, at_step: Callable[[int], object] | None = None, *, digests: bool = False
) -> Measured:
    """All batches of an epoch."""
    measured, tally = Measured(), Tally(job.kind, job.num, digests=digests)
    begin, end = max(job.steps // EDGE, 1), job.steps - max(job.steps // EDGE, 1)
    begun = 0.0
    for step, (values, labels) in enumerate(epoch()):
        now = time.monotonic()
        if step == 0:
            measured.first = now
        if step == begin:
            begun = now
        if step == end:
            measured.middle_s, measured.middle_samples = now - begun, (end - begin) * job.batch
        tally.take(values, labels)
        if at_step is not None:
            at_step(step)
    measured.last = time.monotonic()
    measured.tally = tally.found()
    return measured


if __name__ == "__main__":
    main(*sys.argv[1:])
