"""From stages to a program: the length of an epoch, which pipelines can be resumed, where shards are opened, and
which settings have no effect.
"""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shards import number_of, write_numbers

from wdskit import Pipeline, PipelineError
from wdskit.engine import stream
from wdskit.shards.index import index_folder


def numbers(pattern):
    return Pipeline().stream(pattern).split_by_worker().map(number_of)


def test_the_length_of_an_epoch_is_the_number_of_its_items(six, monkeypatch):
    """This holds for every number of workers that share it."""
    for n, num_workers in itertools.product([1, 5, 8, 12], [1, 2, 3]):
        built = numbers(six).with_epoch(n).build()
        counts = []
        for worker in range(num_workers):
            info = SimpleNamespace(id=worker, num_workers=num_workers)
            monkeypatch.setattr(stream, "get_worker_info", functools.partial(copy.copy, info))
            counts.append(sum(1 for _ in built.items(0)))
        assert built.num_items == sum(counts) == n
    assert numbers(six).build().num_items is None


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
