"""`BatchMaker` makes the same batches in any job and any thread, and each failure is an
`Outcome` after the batches before it.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digests import digest_of
from images import encoded, photo
from masks import mask_of
from shards import index_numbers, write_indexed, write_pictures

from wdskit import Pipeline, SampleError, ShardError, native
from wdskit.engine import batch as batch_module
from wdskit.engine.batch import Batch, BatchMaker
from wdskit.engine.outcome import Outcome
from wdskit.engine.program import Job, Program
from wdskit.loader.memory import Arena, Arenas, Block
from wdskit.order.steps import Steps
from wdskit.shards.index import index_folder
from wdskit.stages.collate import FRESH
from wdskit.stages.images.fused import FusedStep

NUM, SIZE = 23, 3


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three shards with 23 samples, each with its number as the label."""
    folder = tmp_path_factory.mktemp("numbers")
    return index_numbers(folder, [6, 10, 7])


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, [6, 10, 7])
    index_folder(folder, workers=1)
    return str(folder)


def add_draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "draw": float(rng.random())}


def add_index(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "pts.npy": np.full((sample["cls"] + 1, 2), sample["cls"], np.float32)}


FORMS: dict[str, Callable[[Pipeline], Pipeline]] = {
    "bytes": lambda pipe: pipe.to_dict("__key__", "cls").batched(SIZE),
    "columns": lambda pipe: pipe.decode(only=["json", "cls"]).to_tuple("json", "cls", *mask_of(pipe)).batched(SIZE),
    "images written into the batch": lambda pipe: (
        pipe.decode("rgb").random_resized_crop(8).random_flip().to_tuple("jpg;png", "cls", *mask_of(pipe)).batched(SIZE)
    ),
    "images and a function": lambda pipe: (
        pipe.decode("rgb8").map(add_draw).resize([9, 8]).to_tuple("jpg;png", "draw", *mask_of(pipe)).batched(SIZE)
    ),
    "ragged": lambda pipe: (
        pipe.decode(only=["cls"])
        .map(add_index)
        .to_tuple("pts.npy", "cls", *mask_of(pipe))
        .batched(SIZE, ragged="pts.npy")
    ),
    "a function of batches": lambda pipe: (
        pipe.to_tuple("__key__", *mask_of(pipe)).batched(SIZE).map(lambda keys: keys[0][::-1])
    ),
    "single samples": lambda pipe: (
        pipe.decode(only=["cls"]).map(add_draw).to_tuple("__key__", "cls", "draw", *mask_of(pipe))
    ),
}


def program_of(pipe: Pipeline, *, threads: int = 1, **options: Any) -> Program:
    built = pipe.build(rank=0, world_size=1, threads=threads, **options)
    assert isinstance(built, Program)
    return built


def steps_of(program: Program) -> Steps:
    return Steps(program.epoch.num_samples, program.epoch.batch, 1, program.epoch.tail)


def run(program: Program, cuts: Sequence[int] = (), arenas: Arenas | None = None, start: int = 0) -> list[Outcome[Any]]:
    """Return the outcomes of the jobs of an epoch. A new job starts at each step of `cuts`."""
    steps = steps_of(program)
    factory = BatchMaker(program)
    bounds = [0, *cuts, len(steps)]
    opened = [factory.open(Job(start, steps, *pair)) for pair in itertools.pairwise(bounds)]
    found = []
    for job in opened:
        arena = Arena(arenas or Arenas())
        found.append(factory(job, arena))
        arena.end()
    return found


def batches_of(outcomes: list[Outcome[Any]]) -> list[Batch]:
    assert [each.error for each in outcomes] == [None] * len(outcomes)
    return [each.with_tensors() for outcome in outcomes for each in outcome.value]


def seen(batches: list[Batch]) -> list[Any]:
    return [(digest_of(each.with_tensors().value), each.num_samples, each.bad) for each in batches]


# --- the same batches


def check_cuts(program: Program) -> list[Any]:
    """Divide the steps of an epoch into jobs in all ways; return the batches."""
    whole = seen(batches_of(run(program)))
    num = len(whole)
    for count in range(num):
        for cuts in itertools.combinations(range(1, num), count):
            assert seen(batches_of(run(program, cuts))) == whole
    return whole


@pytest.mark.parametrize("form", ["columns", "images written into the batch", "ragged", "images and a function"])
def test_jobs_that_are_cut_anywhere_make_the_same_batches(pictures: str, form: str) -> None:
    program = program_of(FORMS[form](Pipeline().exact(pictures, seed=3, lanes=4, window=8)), threads=2)
    assert len(check_cuts(program)) == 7


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("uses_native", [True, False])
@pytest.mark.parametrize("form", ["images written into the batch", "images and a function"])
def test_jobs_of_damaged_images_make_the_same_batches_and_list_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, tail: str, *, uses_native: bool
) -> None:
    whole = encoded(photo(40, 50), "JPEG", quality=90)
    bad = {7: b"no image", 8: whole[:200], 15: whole[:-2]}
    samples = {f"k{at:02d}": {"jpg": bad.get(at, whole), "cls": b"%d" % at} for at in range(18)}
    write_indexed(tmp_path, samples)
    if not uses_native:
        monkeypatch.setenv("WDSKIT_NATIVE", "0")
    native.native.cache_clear()
    try:
        pipe = FORMS[form](Pipeline().exact(str(tmp_path), seed=3, tail=tail))
        batches = check_cuts(program_of(pipe, threads=3, errors={"max_bad": 9}))
    finally:
        native.native.cache_clear()
    assert sorted(one.key for _, _, samples in batches for one in samples) == ["k07", "k08", "k15"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Samples with two images, which are lossless, so that fused stages give the same pixels as single ones."""
    folder = tmp_path_factory.mktemp("pairs")
    names = ("left.png", "right.png")
    samples = {
        f"k{at:02d}": {name: encoded(photo() + np.uint8(3 * at + side), "PNG") for side, name in enumerate(names)}
        for at in range(8)
    }
    return write_indexed(folder, samples)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sizes", [([9, 8], [9, 8]), ([9, 8], [6, 7]), (9, [6, 7])])
def test_two_fused_images_give_what_single_stages_give(pairs: str, sizes: tuple[Any, Any], threads: int) -> None:
    found = []
    for fuse in (True, False):
        pipe = Pipeline().sequential(pairs)
        for name, size in zip(("left.png", "right.png"), sizes, strict=True):
            pipe = pipe.decode("rgb8", only=name, fuse=fuse).resize(size, fields=name)
        found.append(
            seen(
                batches_of(
                    run(program_of(pipe.to_tuple("left.png", "right.png", "__valid__").batched(4), threads=threads))
                )
            )
        )
    assert found[0] == found[1]


# --- failures


def test_a_job_that_cannot_be_opened_is_an_outcome(numbers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(Pipeline().exact(numbers, seed=3).batched(SIZE))

    def fails(*_: Any) -> Any:
        raise ShardError(shard="s.tar", offset=0, problem="planned", remedy="")

    monkeypatch.setattr(Program, "locate", fails)
    [outcome] = run(program)
    assert isinstance(outcome.error, ShardError)
    assert not outcome.value


@pytest.mark.parametrize("threads", [1, 2])
def test_a_cancelled_job_ends_after_the_samples_that_run(numbers: str, threads: int) -> None:
    made: list[str] = []
    cancelled = threading.Event()

    def fifth_cancels(sample: Any) -> Any:
        made.append(sample["__key__"])
        if len(made) == 5:
            cancelled.set()
        return sample

    program = program_of(Pipeline().exact(numbers, seed=3).map(fifth_cancels).batched(SIZE), threads=threads)
    factory = BatchMaker(program)
    steps = steps_of(program)
    outcome = factory(factory.open(Job(0, steps, 0, len(steps))), FRESH, cancelled.is_set)
    assert outcome.error is not None
    assert 5 <= len(made) <= 5 + threads


@pytest.mark.parametrize("threads", [1, 2])
def test_a_cancelled_job_decodes_no_further_images(
    pictures: str, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    prepared: list[str] = []
    prepare = FusedStep.prepare

    def note(self: FusedStep, sample: Any, origin: Any) -> Any:
        prepared.append(origin.key)
        return prepare(self, sample, origin)

    monkeypatch.setattr(FusedStep, "prepare", note)
    monkeypatch.setattr(batch_module, "CHUNK", 4)
    pipe = Pipeline().exact(pictures).decode("rgb8").random_resized_crop(8).to_tuple("jpg;png", "cls").batched(SIZE)
    program = program_of(pipe, threads=threads)
    assert program.writer is not None
    factory = BatchMaker(program)
    steps = steps_of(program)
    outcome = factory(factory.open(Job(0, steps, 0, len(steps))), FRESH, lambda: bool(prepared))
    assert outcome.error is not None
    assert 1 <= len(prepared) <= threads * batch_module.CHUNK < NUM - SIZE


# --- bad samples


# --- memory


class Lent(Arenas):
    """Stores the address of each block that it lends."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[int] = []

    def take(self, num_bytes: int) -> Block:
        block = super().take(num_bytes)
        self.addresses.append(block.address)
        return block


def test_a_failed_job_gives_its_memory_back(pictures: str) -> None:
    """This needs no garbage collector: the error and the batches are not in a cycle."""
    pipe = Pipeline().exact(pictures, seed=3).decode("rgb").random_resized_crop(80)
    bad = pipe.map(lambda sample: sample if sample["__key__"] != "k011" else 1 / 0).to_tuple("jpg;png").batched(SIZE)
    program, memory = program_of(bad), Lent()
    factory, steps = BatchMaker(program), steps_of(program)
    gc.disable()
    try:
        for _ in range(3):
            arena = Arena(memory)
            outcome = factory(factory.open(Job(0, steps, 0, len(steps))), arena)
            arena.end()
            assert type(outcome.error) is SampleError
            assert outcome.value
            del outcome
    finally:
        gc.enable()
    assert {*memory.addresses} == {*memory.addresses[: len(memory.addresses) // 3]}
