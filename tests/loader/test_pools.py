"""Planned batches from any number of processes and threads: equal to the bit, made ahead of the consumer, freed with
the loader; errors name their sample.
"""

from __future__ import annotations

import ast
import functools
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import encoded, photo
from leaks import leftovers, open_things, opened_since
from shards import fail_on_7, number_of, write_shard

from wdskit import Pipeline, PipelineError, SampleError, ShardError
from wdskit.engine.outcome import WorkerTraceback
from wdskit.loader import loader as loader_module
from wdskit.loader import pools as pool_module
from wdskit.shards.index import index_folder

WAYS = [
    {"workers": 0, "threads": 1},
    {"workers": 0, "threads": 4},
    {"workers": 1, "threads": 1},
    {"workers": 1, "threads": 3},
    {"workers": 2, "threads": 2},
    {"workers": 3, "threads": 1},
]
PROCESSES = [way for way in WAYS if way["workers"]]


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("jpegs")
    samples = {f"k{at:02d}": {"jpg": encoded(photo() + np.uint8(at), "JPEG"), "cls": b"%d" % at} for at in range(30)}
    write_shard(folder / "s.tar", samples)
    index_folder(folder, workers=1)
    return str(folder)


def exact(shards: str) -> Pipeline:
    return Pipeline().exact(shards, seed=5, lanes=4, window=9)


def crops(pipe: Pipeline, size: int = 200) -> Pipeline:
    return pipe.decode("rgb8").random_resized_crop(size).random_flip()


def plain(batch: Any) -> list[Any]:
    parts = list(batch.values()) if isinstance(batch, dict) else batch
    return [part.numpy().tobytes() if isinstance(part, torch.Tensor) else part for part in parts]


SHAPES: dict[str, Callable[[Pipeline], Pipeline]] = {
    "uint8 tuples": lambda pipe: crops(pipe).to_tuple("jpg;png", "cls", "__key__"),
    "float tuples": lambda pipe: crops(pipe).normalize("imagenet").to_tuple("cls", "jpg;png"),
    "dicts": lambda pipe: crops(pipe).rename(image="jpg;png").to_dict("image", "cls"),
    "tensors": lambda pipe: crops(pipe).to_tensor().to_tuple("jpg;png", "cls"),
    "a function behind": lambda pipe: crops(pipe).map_dict(cls=add_one).to_tuple("jpg;png", "cls"),
    "bytes": lambda pipe: pipe.to_tuple("jpg;png", "__key__"),
}


def add_one(label: int) -> int:
    return label + 1


# --- equal batches


@pytest.mark.parametrize("name", SHAPES)
def test_every_way_gives_the_same_batches_to_the_bit(pictures, name):
    make = SHAPES[name](exact(pictures)).batched(16).loader
    whole = None
    for way in WAYS:
        loader = make(**way)
        found = [plain(batch) for _ in range(2) for batch in loader]
        assert len(found) == 8
        whole = whole or found
        assert found == whole, way


def test_batches_that_are_kept_stay_as_they_were(pictures):
    """Memory is used again only after all references to it are gone."""
    for way in WAYS:
        loader = SHAPES["uint8 tuples"](exact(pictures)).batched(16).loader(**way)
        kept = [(batch, plain(batch)) for _ in range(3) for batch in loader]
        assert all(plain(batch) == then for batch, then in kept)


def test_images_are_written_where_their_batch_stands(pictures):
    """Decoded images go directly into the batch; with a function between, they are copied."""
    for name, is_written in (("uint8 tuples", True), ("dicts", True), ("a function behind", False)):
        built = SHAPES[name](exact(pictures)).batched(16).build()
        assert (built.writer is not None) == is_written, name


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_every_start_method_gives_the_same(pictures, method):
    make = SHAPES["float tuples"](exact(pictures)).batched(16).loader
    expected = [plain(batch) for batch in make(workers=0)]
    workers = 1 if method == "spawn" else 2  # a worker takes 2 s to load torch
    assert [plain(batch) for batch in make(workers=workers, threads=2, start_method=method)] == expected


def environment_of(sample):
    return os.environ.get("AWS_PROFILE", "")


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_have_the_environment_of_the_moment(numbers, monkeypatch, method):
    """A fork server runs for long: it lacks the variables that a program or a notebook sets later."""
    pipe = Pipeline().exact(numbers).map(environment_of)
    for profile in ("one", "two", ""):
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        if profile:
            monkeypatch.setenv("AWS_PROFILE", profile)
        assert set(pipe.loader(workers=1, start_method=method)) == {profile}


WITHOUT_TORCH = """
import multiprocessing, sys
from pathlib import Path
import torch
import wdskit
from wdskit.native import native

PIPELINES = {
    "bytes": lambda pipe: pipe.to_tuple("jpg;png", "cls", "__valid__").batched(4),
    "labels": lambda pipe: pipe.decode(only="cls").to_dict("cls", "__key__").batched(4),
    "single samples": lambda pipe: pipe.decode(only="cls").to_tuple("jpg;png", "cls", "__valid__"),
    "uint8": lambda pipe: pipe.decode("rgb8").random_resized_crop(64).to_tuple("jpg;png", "__valid__").batched(4),
    "float": lambda pipe: (
        pipe.decode("rgb8").resize(70).center_crop(64).random_flip().normalize("imagenet")
        .to_tuple("jpg;png", "__valid__").batched(4)
    ),
}

def plain(batch):
    parts = batch.values() if isinstance(batch, dict) else batch
    return [part.numpy().tobytes() if isinstance(part, torch.Tensor) else part for part in parts]

def private_kb(pid):
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))

if __name__ == "__main__":
    for name, make in PIPELINES.items():
        if name in {"uint8", "float"} and native() is None:
            continue
        pipe = make(wdskit.Pipeline().exact(sys.argv[1], seed=3, tail="pad"))
        expected = [plain(batch) for batch in pipe.loader(workers=0)]
        with pipe.loader(workers=2, start_method=sys.argv[2]) as loader:
            assert [plain(batch) for batch in loader] == expected, name
            workers = [each.pid for each in multiprocessing.active_children()]
            assert len(workers) == 2, workers
            for pid in workers:
                assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text(), name
                assert private_kb(pid) < 60_000, (name, private_kb(pid))
    print("right")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_do_without_torch_and_make_the_same_batches(jpegs, method, tmp_path):
    """This holds even if the script has imported torch; the workers have little memory of their own."""
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_TORCH)
    done = subprocess.run([sys.executable, script, jpegs, method], check=False, capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr


LATE_TORCH = """
import wdskit

def settings_of_torch(sample):
    import torch
    from torch.utils.data import get_worker_info
    return repr((get_worker_info().id, torch.get_num_threads(), torch.initial_seed()))

if __name__ == "__main__":
    for method in ("spawn", "fork"):
        pipe = wdskit.Pipeline().exact({shards!r}).map(settings_of_torch).batched(2)
        print({{settings for batch in pipe.loader(workers=2, start_method=method) for settings in batch}})
"""


def test_torch_that_a_function_imports_late_has_one_thread_and_the_seed_of_its_worker(numbers, tmp_path):
    """A forked process, which has torch from the start, has this too; each worker has another seed."""
    script = tmp_path / "train.py"
    script.write_text(LATE_TORCH.format(shards=numbers))
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True, timeout=120)
    spawned, forked = (sorted(map(ast.literal_eval, ast.literal_eval(line))) for line in done.stdout.splitlines())
    assert [each[:2] for each in spawned] == [(0, 1), (1, 1)]
    assert spawned == forked
    assert spawned[0][2] != spawned[1][2]


# --- ahead of the consumer


class Counted:
    """Counts the samples that are made in this process."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.changed = threading.Condition()

    def __call__(self, sample: Any) -> int:
        with self.changed:
            self.made.append(number_of(sample))
            self.changed.notify_all()
        return self.made[-1]

    def wait_for(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.made) >= number, 30), len(self.made)


def test_batches_are_made_ahead_and_no_more_than_told(numbers):
    counted = Counted()
    loader = exact(numbers).map(counted).batched(3).loader(workers=0, threads=2, prefetch=2)
    batches = iter(loader)
    next(batches)
    counted.wait_for(9)
    assert len(counted.made) == 9
    next(batches)
    counted.wait_for(12)
    assert len(counted.made) == 12


def test_the_next_epoch_is_begun_before_it_is_asked_for(numbers):
    """Each sample of the next epoch is made once."""
    counted = Counted()
    loader = exact(numbers).map(counted).batched(3).loader(workers=0, threads=2, prefetch=2)
    for epoch in range(4):
        loader.set_epoch(epoch)
        assert len([*loader]) == 13
        counted.wait_for((epoch + 1) * 39 + 6)
        assert len(counted.made) == (epoch + 1) * 39 + 6


def test_after_an_epoch_two_jobs_of_the_next_are_made(numbers):
    """After `break` no batch is made."""
    counted = Counted()
    loader = exact(numbers).map(counted).batched(3).loader(workers=0, threads=2, prefetch=6)
    for number in (1, 2):
        assert len([*loader]) == 13
        assert len(loader._waiting) == 2
        counted.wait_for(39 * number + 6)
    next(iter(loader))
    assert not loader._waiting


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("way", WAYS[2:4], ids=str)
def test_workers_free_memory_after_an_epoch_and_after_a_break(numbers, way, monkeypatch):
    monkeypatch.setattr(loader_module, "_MOST_FOLLOWING", 0)
    loader = exact(numbers).map(large).batched(3).loader(**way, start_method="fork")
    for stop_at in (13, 2, 12):
        for number, _ in enumerate(loader, 1):
            if number == stop_at:
                break
        del _
        [worker] = multiprocessing.active_children()
        until = time.monotonic() + 30
        while (left := shared_kb(worker.pid)) > 40_000:  # of up to 80 MB; a batch in transit stays
            assert time.monotonic() < until, left
            select.select([], [], [], 0.01)


def large(sample: Any) -> torch.Tensor:
    return torch.full((1 << 20,), float(number_of(sample)))  # 12 MB per batch


def shared_kb(pid: int) -> int:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssShmem")]
    return int(line.split()[1])


def test_what_was_made_ahead_for_another_epoch_is_not_used(numbers):
    pipe = exact(numbers).map(number_of).batched(3)
    for way in WAYS[1:]:
        loader, expected = pipe.loader(**way), pipe.loader(workers=0)
        for epoch in (0, 7, 7, 3):
            for each in (loader, expected):
                each.set_epoch(epoch)
            assert torch.equal(torch.stack([*loader]), torch.stack([*expected]))


# --- errors


def die_once(marker: str, how: Callable[[], object], sample: Any) -> int:
    if number_of(sample) == 5 and not Path(marker).exists():
        Path(marker).touch()
        how()
    return number_of(sample)


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    sys.exit("enough")


@pytest.mark.parametrize("way", PROCESSES, ids=str)
def test_a_dead_worker_is_named_at_once_and_then_replaced(numbers, tmp_path, way):
    pipe = exact(numbers).map(functools.partial(die_once, str(tmp_path / "died"), kill_me)).batched(3)
    loader = pipe.loader(**way)
    others = set(multiprocessing.active_children())
    begun = time.monotonic()
    with pytest.raises(PipelineError, match=r"^a worker process died: worker \d \(pid \d+\) was killed by SIGKILL\.\n"):
        list(loader)
    assert time.monotonic() - begun < 30  # 0.1 s on an idle machine
    assert not set(multiprocessing.active_children()) - others
    assert sorted(torch.cat([*loader]).tolist()) == list(range(39))


def test_a_worker_that_dies_while_nobody_waits_is_named_too(numbers):
    loader = exact(numbers).map(number_of).batched(3).loader(workers=2)
    begun = iter(loader)
    next(begun)
    victim = multiprocessing.active_children()[0]
    victim.kill()
    victim.join()
    with pytest.raises(PipelineError, match=f"pid {victim.pid}"):
        list(begun)


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_a_function_that_leaves_is_an_error_and_the_loader_goes_on(numbers, tmp_path, way):
    function = functools.partial(die_once, str(tmp_path / "died"), leave)
    loader = exact(numbers).map(function).batched(3).loader(**way)
    with pytest.raises((PipelineError, SystemExit), match="enough"):
        list(loader)
    loader.set_epoch(0)
    assert sorted(torch.cat([*loader]).tolist()) == list(range(39))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_an_error_of_a_function_names_stage_shard_and_key(numbers, way):
    """An error of a worker process has its traceback there; earlier batches are delivered first."""
    loader = Pipeline().sequential(numbers).map(fail_on_7).batched(3).loader(**way)
    seen = []
    with pytest.raises(SampleError) as caught:
        for batch in loader:
            seen += map(int, batch["cls"])
    assert seen == list(range(6))
    assert (caught.value.stage, caught.value.key) == ("map", "n000007")
    assert caught.value.shard == f"{numbers}/s-001.tar"
    if way["workers"]:
        assert type(caught.value.__cause__) is ValueError
        assert type(caught.value.__cause__.__cause__) is WorkerTraceback
        assert "in fail_on_7" in str(caught.value.__cause__.__cause__)


@pytest.mark.parametrize("way", PROCESSES, ids=str)
def test_a_batch_that_does_not_pickle_is_an_error_and_no_dead_worker(numbers, way):
    loader = exact(numbers).map(locked).batched(3).loader(**way)
    with pytest.raises(TypeError, match="cannot pickle"):
        list(loader)


def locked(_: Any) -> Any:
    return threading.Lock()


def test_of_several_errors_in_a_batch_the_first_sample_counts(numbers):
    def fail(sample: Any) -> None:
        raise ValueError(number_of(sample))

    loader = Pipeline().sequential(numbers).map(fail).batched(39).loader(workers=0, threads=4)
    for _ in range(5):
        with pytest.raises(SampleError, match="n000000"):
            list(loader)


def test_a_damaged_shard_keeps_its_facts(tmp_path):
    path = write_shard(tmp_path / "a.tar", {f"k{at}": {"cls": b"%d" % at} for at in range(5)})
    index_folder(tmp_path)
    data = bytearray(path.read_bytes())
    data[3 * 1024 + 150] ^= 1
    path.write_bytes(data)
    for way in WAYS:
        with pytest.raises(ShardError) as caught:
            list(Pipeline().sequential(tmp_path).batched(5).loader(**way))
        assert caught.value.shard == str(path)


# --- leaks

ENDS = {
    "batches": lambda shards: exact(shards).map(number_of).batched(3),
    "samples": lambda shards: exact(shards).map(number_of),
    "bytes": lambda shards: exact(shards).batched(20),
    "an error": lambda shards: exact(shards).map(fail_on_7).batched(3),
}


@pytest.mark.parametrize("way", [*WAYS, {"workers": 1, "threads": 2, "persistent_workers": False}], ids=str)
@pytest.mark.parametrize("end", ENDS)
def test_a_dropped_loader_leaves_nothing(numbers, end, way):
    """No thread, process, descriptor or shared memory is left after a whole epoch, a broken epoch and an error."""
    make = functools.partial(ENDS[end](numbers).loader, **way)
    if leftovers(make):  # the first loader of a process also starts permanent parts of torch and multiprocessing
        assert leftovers(make) == {}


def test_threads_and_processes_that_do_not_persist_end_with_the_epoch(numbers):
    for way in (*WAYS[1:], *WAYS[1:]):  # the first loader of a process also starts permanent parts of multiprocessing
        loader = ENDS["batches"](numbers).loader(**way, persistent_workers=False)
        before = open_things()
        list(loader)
    assert not opened_since(before)


def test_a_worker_that_does_not_end_is_killed(numbers, tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "_PATIENCE_S", 0.1)
    loader = exact(numbers).map(functools.partial(hang, str(tmp_path / "hangs"))).batched(3).loader(workers=1)
    loader._pool.submit(next(loader._jobs(loader._counter.begin())))
    while not (tmp_path / "hangs").exists():
        pass
    [worker] = [child.pid for child in multiprocessing.active_children()]
    del loader
    assert not multiprocessing.active_children()
    assert not Path(f"/proc/{worker}").exists()


def hang(marker: str, sample: Any) -> None:
    Path(marker).touch()
    threading.Event().wait()


def test_workers_know_that_they_are_some(numbers):
    """`get_worker_info` works as in torch's loader, and generators differ between workers."""
    loader = exact(numbers).map(who).loader(workers=3)
    found = {tuple(each) for each in loader}
    assert {(number, workers) for number, workers, _ in found} == {(0, 3), (1, 3), (2, 3)} or len(found) == 1
    assert len({draw for *_, draw in found}) == len(found)


_DRAWN: list[float] = []


def who(sample: Any) -> list[float]:
    info = torch.utils.data.get_worker_info()
    if not _DRAWN:
        _DRAWN.append(torch.rand(()).item())
    return [info.id, info.num_workers, _DRAWN[0]]


def test_threads_that_make_batches_have_one_thread_of_torchs_and_the_caller_keeps_its_own(numbers):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for way in WAYS:
            batches = exact(numbers).map(torch_threads).batched(3).loader(**way)
            assert {int(number) for batch in batches for number in batch} == {1}, way
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def torch_threads(_: Any) -> int:
    return torch.get_num_threads()


def nested_rows(batch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the API is a prototype
        return {"rows": torch.nested.nested_tensor([torch.arange(int(number) % 4 + 1) for number in batch])}


def sparse_rows(batch):
    return {"rows": torch.diag(batch.float()).to_sparse()}


@pytest.mark.parametrize("make", [nested_rows, sparse_rows])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_nested_and_sparse_tensors_are_batches_too(numbers, make, workers, tail):
    pipe = Pipeline().exact(numbers, tail=tail).map(number_of).batched(4).map(make)
    plain = Pipeline().exact(numbers, tail=tail).map(number_of).batched(4)
    for found, batch in zip(pipe.loader(workers=workers), plain.loader(workers=0), strict=True):
        expected = make(batch[0] if tail == "pad" else batch)["rows"]
        pairs = zip(found["rows"].unbind(), expected.unbind(), strict=True)
        assert all(torch.equal(one.to_dense(), other.to_dense()) for one, other in pairs)


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), EOFError("unexpected EOF")])
def test_workers_that_cannot_be_started_are_an_error_and_may_start_later(numbers, monkeypatch, error):
    def fail(*_: Any) -> None:
        raise type(error)(*error.args)  # the traceback of `error` would keep the loader and its workers alive

    monkeypatch.setattr(pool_module, "_Worker", fail)
    loader = Pipeline().exact(numbers).map(number_of).batched(4).loader(workers=2)
    with pytest.raises(type(error), match=str(error.args[-1])):
        list(loader)
    monkeypatch.undo()
    assert len({int(number) for batch in loader for number in batch}) == 4 * len(loader)
