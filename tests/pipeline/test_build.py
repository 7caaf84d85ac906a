"""Settings of a loader that have no effect or cannot be kept are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shards import index_numbers

from wdskit import Pipeline, PipelineError


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("numbers")
    return index_numbers(folder, [5, 4])


REFUSED: dict[str, Any] = {"threads": 2, "timeout": 5.0, "device": "cuda"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_stream_cannot_do_is_refused_by_name(indexed: str, name: str) -> None:
    with pytest.raises(PipelineError, match=f"^{name}: "):
        Pipeline().stream(f"{indexed}/*.tar").loader(workers=0, **{name: REFUSED[name]})


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_folder_of_bad_samples_that_is_a_file_is_refused(indexed: str, tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=f"'{tmp_path}/file"):
        Pipeline().exact(indexed).loader(workers=0, errors={"max_bad": 1, "dir": f"{tmp_path}/file{below}"})
