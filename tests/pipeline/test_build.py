"""From stages to a program: the length of an epoch, which pipelines can be resumed, where shards are opened, and
which settings have no effect.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shards import even, number_of, write_numbers

from wdskit import Pipeline, PipelineError
from wdskit.engine import stream
from wdskit.shards.index import index_folder


def numbers(pattern):
    return Pipeline().stream(pattern).split_by_worker().map(number_of)


TAILS = {
    "batched": lambda p, n: p.batched(n),
    "full batches": lambda p, n: p.batched(n, partial=False),
    "shuffle": lambda p, n: p.shuffle(n),
    "map": lambda p, n: p.map(str),
}


@pytest.mark.parametrize("names", [*itertools.permutations(TAILS, 2)], ids="+".join)
def test_the_length_of_an_epoch_is_the_number_of_its_items(six, names, monkeypatch):
    """This holds for all stages after with_epoch, and for every number of workers that share it."""
    first, second = names
    if {*names} == {"batched", "full batches"}:
        return
    for n, size in itertools.product([1, 5, 8, 12], [2, 3]):
        built = TAILS[second](TAILS[first](numbers(six).with_epoch(n), size), size).build()
        for num_workers in (1, 2, 3):
            counts = []
            for worker in range(num_workers):
                info = SimpleNamespace(id=worker, num_workers=num_workers)
                monkeypatch.setattr(stream, "get_worker_info", functools.partial(copy.copy, info))
                with contextlib.suppress(PipelineError):  # one worker without items
                    counts.append(sum(1 for _ in built.items(0)))
            assert built.num_items(num_workers) == sum(counts)


@pytest.mark.parametrize(
    "change",
    [lambda p: p.select(even), lambda p: p.stage(iter)],
    ids=["select", "foreign"],
)
def test_what_only_running_shows_has_no_length(six, change):
    assert change(numbers(six).with_epoch(5)).build().num_items(1) is None
    assert change(numbers(six)).with_epoch(5).build().num_items(1) == 5
    assert numbers(six).build().num_items(1) is None


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("numbers")
    write_numbers(folder, [5, 4])
    index_folder(folder, workers=1)
    return str(folder)


REFUSED: dict[str, Any] = {"threads": 2, "timeout": 5.0, "device": "cuda"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_stream_cannot_do_is_refused_by_name(indexed: str, name: str) -> None:
    with pytest.raises(PipelineError, match=f"^{name}: "):
        Pipeline().stream(f"{indexed}/*.tar").loader(workers=0, **{name: REFUSED[name]})


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_folder_of_bad_samples_that_is_a_file_is_refused(indexed: str, tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PipelineError, match=r"errors\.dir: .*file is not a folder"):
        Pipeline().exact(indexed).loader(workers=0, errors={"max_bad": 1, "dir": f"{tmp_path}/file{below}"})
