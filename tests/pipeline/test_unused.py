"""A setting that has no effect is logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shards import write_numbers

from wdskit import Pipeline, PipelineError, make_loader
from wdskit.pipeline.settings import LoaderSpec
from wdskit.shards.index import index_folder


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("numbers")
    write_numbers(folder, [5, 4])
    index_folder(folder, workers=1)
    return str(folder)


CACHE = {"dir": "/tmp/never-made", "size": "1GB"}
SETTINGS: dict[str, Any] = {
    "threads": 2,
    "prefetch": 4,
    "persistent_workers": False,
    "start_method": "fork",
    "pin_memory": True,
    "ranks_per_node": 1,
    "timeout": 60.0,
    "cache": CACHE,
}
SITUATIONS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "exact with workers": ("exact", {"workers": 1}, {"cache"}),
    "exact without workers": ("exact", {"workers": 0}, {"cache", "prefetch", "start_method"}),
    "exact with threads": ("exact", {"workers": 0, "threads": 2}, {"cache", "start_method"}),
    "stream with workers": ("stream", {"workers": 1}, {"cache", "ranks_per_node", "persistent_workers"}),
    "stream without workers": (
        "stream",
        {"workers": 0},
        {"cache", "ranks_per_node", "persistent_workers", "prefetch", "start_method"},
    ),
    "stream with threads": (
        "stream",
        {"workers": 0, "threads": 2},
        {"cache", "ranks_per_node", "persistent_workers", "prefetch", "start_method"},
    ),
}
"""The source, its settings, and the settings that have no effect then."""


def test_the_table_names_every_setting() -> None:
    assert {*SETTINGS, "workers", "device"} == {*LoaderSpec.model_fields, "cache"}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_setting_without_effect_is_logged_and_the_loader_runs(numbers: str, situation: str, caplog) -> None:
    """One line for each, and none for settings that have an effect."""
    source, base, unused = SITUATIONS[situation]
    stages = [{source: numbers if source == "exact" else f"{numbers}/*.tar"}, {"to_tuple": "__key__"}, {"batched": 2}]
    for name, value in SETTINGS.items():
        if name in base:
            continue
        config: dict[str, Any] = {"pipeline": stages, "loader": base if name == "cache" else base | {name: value}}
        caplog.clear()
        make_loader(config | ({"cache": value} if name == "cache" else {}))
        place = "cache.dir" if name == "cache" else f"loader.{name}"
        lines = [line.partition(" has no effect")[0] for line in caplog.messages if "no effect" in line]
        assert lines == ([place] if name in unused else []), name


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_folder_of_bad_samples_that_is_a_file_is_refused(numbers: str, tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PipelineError, match=r"errors\.dir: .*file is not a folder"):
        Pipeline().exact(numbers).loader(workers=0, errors={"max_bad": 1, "dir": f"{tmp_path}/file{below}"})
