"""Buckets: each sample once an epoch, one bucket per step on all ranks, every resume point, compared with a count."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import HastyDisk, on
from PIL import Image

import wdskit
from wdskit import Pipeline, PipelineError, SelectionError, StateError, pack
from wdskit.dataset.subset import Subset
from wdskit.errors import ConfigError
from wdskit.order.buckets import BucketOrder, BucketPlan, BucketSteps
from wdskit.order.exact import ExactOrder
from wdskit.order.steps import rank_positions
from wdskit.order.subset import PickedOrder
from wdskit.stages.buckets import Bucketed


def make_order(counts: list[int], of_samples: np.ndarray, sizes: list[int], tail: Any, seed: int) -> BucketOrder:
    """Return the order of samples whose buckets are `of_samples`."""
    subsets = [Subset(np.array(counts), of_samples == bucket) for bucket in range(len(sizes))]
    plan = BucketPlan(tuple(int(subset.counts.sum()) for subset in subsets), tuple(sizes), tail, seed)
    return BucketOrder(plan, [PickedOrder(ExactOrder(one.counts, seed=seed), [one]) for one in subsets])


def numbers_of(order: BucketOrder, counts: list[int], positions: np.ndarray) -> np.ndarray:
    shards, samples = order.take(positions)
    return np.concatenate([[0], np.cumsum(counts)])[shards] + samples


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 16])
def test_each_sample_once_and_one_bucket_a_step_on_all_ranks(tail: str, world_size: int):
    counts, sizes = [200, 0, 31, 369], [48, 96, 48]
    of_samples = np.random.default_rng(5).choice(3, size=600, p=[0.2, 0.7, 0.1])
    order = make_order(counts, of_samples, sizes, tail, seed=3)
    plan = order.plan
    for epoch in range(3):
        start, steps = epoch * plan.num_samples, BucketSteps(plan, epoch, world_size)
        assert (steps.batch, steps.global_batch) == (96 // world_size, 96)
        seen = Counter[int]()
        for step in range(len(steps)):
            buckets = set()
            own = [rank_positions(order, start, steps, step, rank=rank) for rank in range(world_size)]
            assert {len(each) for each in own} == {sizes[steps.bucket_at(step)] // world_size}
            for positions in own:
                real = positions[positions < plan.num_samples]
                numbers = numbers_of(order, counts, real + start)
                seen.update(numbers.tolist())
                buckets |= set(of_samples[numbers].tolist())
            assert buckets <= {steps.bucket_at(step)}
        assert set(seen.values()) == {1}
        for bucket, size in enumerate(sizes):
            has = int((of_samples == bucket).sum())
            found = sum(of_samples[number] == bucket for number in seen)
            assert found == (has if tail == "pad" else has // size * size)
        assert len(seen) == plan.num_samples == sum(plan.counts) - steps.num_dropped
        assert bool(steps.describe_dropped()) == (steps.num_dropped > 6)


# --- loaders


SHAPES = [[32, 32], [24, 40], [40, 24]]


def picture(width: int, height: int, number: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), (number % 256, number // 2, 7)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 110 pictures of three aspect ratios, each with a number of tokens."""
    chance = random.Random(2)
    rows = []
    for number in range(110):
        width, height = chance.choice([(50, 50), (64, 40), (40, 66), (52, 50)])
        document = {
            "n": number,
            "tokens": chance.randrange(1, 60),
            "word": "ab"[number % 2],
            "few": 1 if number % 9 else 3,
        }
        rows.append({"__key__": f"k{number:03d}", "png": picture(width, height, number), "json": document})
    folder = tmp_path_factory.mktemp("buckets") / "data"
    columns = "width,height,tokens=json.tokens,word=json.word,few=json.few"
    on(HastyDisk(), pack, rows, folder, max_samples=17, columns=columns)
    return folder


def make(folder: Path, *, tail: str = "pad", by: str = "aspect", **source: Any) -> Pipeline:
    pipe = Pipeline().exact(str(folder), seed=11, tail=tail, **source).decode("rgb8")
    if by == "tokens":
        return pipe.to_dict("json", "__key__").bucketed(by="tokens", edges=[8, 16, 60], budget=240, divisor=4)
    pipe = pipe.resize_to_bucket(crop="random").to_dict("png", "json", "__key__")
    return pipe.bucketed(by="aspect", shapes=SHAPES, global_size=12)


def run(pipe: Pipeline, world_size: int, *, state: Any = None, stop: int | None = None, **options: Any) -> Any:
    """Return the keys of each step over all ranks, a digest of each step, and the state after `stop` steps."""
    steps: list[dict[str, Any]] = []
    states = []
    for rank in range(world_size):
        loader = pipe.loader(rank=rank, world_size=world_size, **{"workers": 0, **options})
        if state is not None:
            loader.load_state_dict(state)
        for step, batch in enumerate(loader):
            if len(steps) <= step:
                steps.append({"keys": [], "bucket": batch["__bucket__"], "digests": []})
            assert batch["__bucket__"] == steps[step]["bucket"]
            valid = batch.get("__valid__", [True] * len(batch["__key__"]))
            rows = [at for at, is_valid in enumerate(valid) if is_valid]
            steps[step]["keys"] += [batch["__key__"][at] for at in rows]
            if "png" in batch:
                assert tuple(batch["png"].shape[2:]) == batch["__bucket__"]
                data = [hashlib.sha256(batch["png"][at].numpy().tobytes()).hexdigest() for at in rows]
                steps[step]["digests"] += data
            else:
                least = {8: 0, 16: 8, 60: 16}[batch["__bucket__"]]
                assert all(least < batch["json"][at]["tokens"] <= batch["__bucket__"] for at in rows)
            if stop is not None and step + 1 == stop:
                break
        states.append(loader.state_dict())
    assert all(each == states[0] for each in states)
    for step in steps:
        pairs = sorted(zip(step["keys"], step["digests"] or step["keys"], strict=True))
        step["keys"], step["digests"] = [key for key, _ in pairs], [digest for _, digest in pairs]
    return steps, states[0]


@pytest.mark.parametrize("by", ["aspect", "tokens"])
@pytest.mark.parametrize(
    "source", [{}, {"where": "tokens > 10"}, {"repeat": {"column": "few"}}, {"range": ["10%", "90%"]}]
)
def test_steps_are_the_same_on_any_ranks_workers_and_threads(folder: Path, by: str, source: dict[str, Any]):
    pipe = make(folder, by=by, **source)
    steps, _ = run(pipe, 1)
    keys = Counter(key for step in steps for key in step["keys"])
    numbers = np.arange(110)
    tokens = wdskit.columns(folder)["tokens"]
    times = np.where((numbers % 9 == 0) & ("repeat" in source), 3, 1)
    if "where" in source:
        times = np.where(tokens > 10, times, 0)
    if "range" in source:
        times = np.where((numbers >= 11) & (numbers < 99), times, 0)
    assert keys == Counter({f"k{n:03d}": int(times[n]) for n in range(110) if times[n]})
    assert len({step["bucket"] for step in steps}) == (2 if (by, *source) == ("tokens", "where") else 3)
    for world_size, options in ((2, {}), (4, {"workers": 2}), (1, {"workers": 2, "threads": 2})):
        assert run(pipe, world_size, **options)[0] == steps
    assert wdskit.plan(pipe, world_size=2).steps == len(steps)


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_every_step_is_a_resume_point_on_other_ranks(folder: Path, tail: str):
    pipe = make(folder, tail=tail)
    loader = pipe.loader(workers=0)
    epochs = [[(batch["__bucket__"], sorted(batch["json"], key=str)) for batch in loader] for _ in range(2)]
    steps, _ = run(pipe, 1)
    for stop in range(1, len(steps)):
        ranks, others = ((1, 2), (2, 4), (4, 1))[stop % 3]
        begun, state = run(pipe, ranks, stop=stop)
        assert begun == steps[:stop]
        rest, _ = run(pipe, others, state=state)
        assert rest == steps[stop:]
    _, state = run(pipe, 2)  # the state at the end of the epoch
    loader = pipe.loader(workers=0)
    loader.load_state_dict(state)
    assert [(batch["__bucket__"], sorted(batch["json"], key=str)) for batch in loader] == epochs[1] != epochs[0]


def test_a_state_of_other_buckets_is_refused(folder: Path):
    _, state = run(make(folder), 1, stop=2)
    pipe = Pipeline().exact(str(folder), seed=11, tail="pad").decode("rgb8").resize_to_bucket().to_dict("png")
    for other in ({"shapes": SHAPES[:2], "global_size": 12}, {"shapes": SHAPES, "global_size": 24}):
        with pytest.raises(StateError, match="buckets is"):
            pipe.bucketed(by="aspect", **other).loader(workers=0).load_state_dict(state)


def test_the_nearest_ratio_is_chosen():
    bucketed = Bucketed(by="aspect", shapes=[[512, 512], [384, 640], [640, 384]], global_size=8)
    chance = np.random.default_rng(0)
    widths, heights = chance.integers(1, 3000, 5000), chance.integers(1, 3000, 5000)
    found = bucketed.assign([widths, heights])
    for width, height, bucket in zip(widths.tolist(), heights.tolist(), found.tolist(), strict=True):
        far = [abs(math.log(width / height) - math.log(w / h)) for h, w in bucketed.labels]
        assert far[bucket] <= min(far) + 1e-12


def test_a_budget_is_the_most_pixels_of_a_global_batch():
    bucketed = Bucketed(by="aspect", shapes=[[512, 512], [384, 640], [1024, 256]], budget=1 << 22)
    for (height, width), size in zip(bucketed.labels, bucketed.sizes, strict=True):
        assert size % 8 == 0
        assert size * height * width <= 1 << 22 < (size + 8) * height * width


def test_what_meets_buckets_and_cannot_is_refused(folder: Path):
    shapes = {"by": "aspect", "shapes": SHAPES, "global_size": 12}
    source = Pipeline().exact(str(folder)).decode("rgb8").resize_to_bucket().to_dict("png")
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: source.bucketed(**shapes).loader(workers=0, rank=0, world_size=5), PipelineError, "multiple of 5"),
        (lambda: source.bucketed(**shapes).with_epoch(5).loader(workers=0), PipelineError, "with_epoch: an"),
        (lambda: source.batched(4).loader(workers=0), PipelineError, "it needs `bucketed"),
        (
            lambda: Pipeline().exact(str(folder)).bucketed(by="tokens", edges=[9], global_size=4).loader(workers=0),
            SelectionError, r"sample \d+ .*tokens is \d+, more than the last of `edges`.*where: tokens <= 9",
        ),
        (
            lambda: Pipeline().resampled(str(folder), weights="tokens").bucketed(**shapes).loader(workers=0),
            PipelineError, "drawn by weights",
        ),
        (lambda: source.bucketed(**{**shapes, "global_size": 400}).loader(workers=0), PipelineError, "cannot fill"),
        (
            lambda: Pipeline().stream(str(folder)).bucketed(**shapes).loader(workers=0),
            (PipelineError, ConfigError), "needs a source that knows its samples",
        ),
        (lambda: source.shuffle(9).bucketed(**shapes).loader(workers=0), PipelineError, "(?s)exact`:(?!.*needs)"),
    ]  # fmt: skip
    for call, kind, told in cases:
        with pytest.raises(kind, match=told):
            call()
