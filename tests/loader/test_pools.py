"""Planned batches from any number of processes and threads: equal to the bit, made ahead of the consumer, freed with
the loader; errors name their sample.
"""

from __future__ import annotations

import ast
import functools
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digests import digest_of
from images import encoded, photo
from leaks import open_descriptors, open_things, opened_since
from shards import fail_on_7, index_numbers, number_of, write_shard

from wdskit import Pipeline, PipelineError, SampleError
from wdskit.engine.outcome import WorkerTraceback
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
        found = [digest_of(batch) for _ in range(2) for batch in loader]
        assert len(found) == 8
        whole = whole or found
        assert found == whole, way


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


def test_what_was_made_ahead_for_another_epoch_is_not_used(numbers):
    pipe = exact(numbers).map(number_of).batched(3)
    for way in WAYS[1:]:
        loader, expected = pipe.loader(**way), pipe.loader(workers=0)
        for epoch in (0, 7, 7, 3):
            for each in (loader, expected):
                each.set_epoch(epoch)
            assert torch.equal(torch.stack([*loader]), torch.stack([*expected]))


def test_function_behind_the_batches_runs_when_its_batch_is_asked_for(numbers):
    seen: list[Any] = []
    pipe = exact(numbers).batched(3).map(lambda batch: seen.append(batch) or batch)
    for number, _ in enumerate(pipe.loader(workers=0, threads=1), start=1):
        assert len(seen) == number


# --- errors


def die_once(marker: str, how: Callable[[], object], sample: Any) -> int:
    if number_of(sample) == 5 and not Path(marker).exists():
        Path(marker).touch()
        how()
    return number_of(sample)


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


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


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_an_error_of_a_function_names_stage_shard_and_key(numbers, way):
    """An error of a worker process has its traceback there; earlier batches are delivered first."""
    loader = Pipeline().sequential(numbers).map(fail_on_7).batched(3).loader(**way)
    seen = []
    with pytest.raises(SampleError) as caught:
        for batch in loader:
            seen += map(int, batch["cls"])
    assert seen == list(range(6))
    assert loader.state_dict()["consumed"] == 6
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


# --- leaks


@pytest.mark.parametrize("threads", [1, 4])
def test_loaders_of_one_process_share_its_descriptors(tmp_path, threads):
    """Two loaders after each other, with more shards than descriptors, most of which the program itself uses."""
    index_numbers(tmp_path, [2] * 90)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
    try:
        loaders = [exact(str(tmp_path)).map(number_of).loader(workers=0, threads=threads) for _ in range(2)]
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(80 - len(open_descriptors()))]
        assert [len({*loader}) for loader in loaders] == [180, 180]
        for file in files:
            os.close(file)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_threads_and_processes_that_do_not_persist_end_with_the_epoch(numbers, monkeypatch, capfd):
    def start(thread: threading.Thread, start: Callable[..., None] = threading.Thread.start) -> None:
        time.sleep(0.1 * (multiprocessing.current_process().name == "wdskit-worker-1"))  # the end comes before
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for way in (*WAYS[1:], *WAYS[1:]):  # the first loader of a process also starts permanent parts of multiprocessing
        loader = exact(numbers).map(number_of).batched(3).with_epoch(1).loader(**way, persistent_workers=False)
        before = open_things()
        list(loader)
    assert not opened_since(before)
    assert capfd.readouterr().err == ""


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
