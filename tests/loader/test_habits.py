"""Habits of training loops: ranks that disagree, functions of an epoch, seeds, paths, classes of batches."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from writing import pack

from wdskit import Pipeline, PipelineError, RankError, make_loader
from wdskit.loader import loader as planned


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("habits")
    for name, count in (("one", 40), ("two", 36)):
        pack([{"__key__": f"{n:03d}", "cls": n} for n in range(count)], base / name, max_samples=10)
    return {name: str(base / name) for name in ("one", "two")}


def pipe_of(folder: str, *, batch: int = 4, **settings: Any) -> Pipeline:
    return Pipeline().exact(folder, seed=settings.pop("seed", 1), **settings).decode().to_dict("cls").batched(batch)


def advanced(loader: Any) -> Any:
    """Return a loader whose next iteration starts after the first step."""
    state = loader.state_dict()
    loader.load_state_dict({**state, "consumed": 8})
    return loader


def at_epoch_1(loader: Any) -> Any:
    loader.set_epoch(1)
    return loader


def same(loader: Any) -> Any:
    return loader


def stream_of(folder: str, *, seed: int = 1, batch: int = 4, items: int = 3) -> Pipeline:
    pipe = Pipeline().stream(folder, seed=seed).split_by_node().decode().to_dict("cls").batched(batch)
    return pipe.with_epoch(items)


DISAGREEING: dict[str, tuple[Callable[[dict[str, str]], Pipeline], Callable[[Any], Any]]] = {
    "stream, seed": (lambda data: stream_of(data["one"], seed=2), same),
    "stream, epoch": (lambda data: stream_of(data["one"]), at_epoch_1),
    "stream, other data": (lambda data: stream_of(data["two"]), same),
    "stream, batch": (lambda data: stream_of(data["one"], batch=2), same),
    "stream, steps": (lambda data: stream_of(data["one"], items=4), same),
    "seed": (lambda data: pipe_of(data["one"], seed=2), same),
    "epoch": (lambda data: pipe_of(data["one"]), at_epoch_1),
    "other data": (lambda data: pipe_of(data["two"]), same),
    "tail": (lambda data: pipe_of(data["one"], tail="pad"), same),
    "batch": (lambda data: pipe_of(data["one"], batch=2), same),
    "state": (lambda data: pipe_of(data["one"]), advanced),
}


@pytest.mark.parametrize("case", DISAGREEING)
@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_disagree_are_an_error_before_the_second_of_them_yields(
    data: dict[str, str], monkeypatch: pytest.MonkeyPatch, case: str, first: int
) -> None:
    """Whichever rank begins; a rank with the same settings is none."""
    store = dist.HashStore()
    monkeypatch.setattr(planned, "group_store", lambda _: store)

    def ranks(pipes: list[Pipeline]) -> list[Any]:
        loaders = [pipe.loader(rank=rank, world_size=2, workers=0) for rank, pipe in enumerate(pipes)]
        for loader in loaders:
            loader._is_rank_given, loader._number = False, 0
        return loaders

    pipe, change = DISAGREEING[case]
    common = stream_of if case.startswith("stream") else pipe_of
    loaders = ranks([common(data["one"]), pipe(data)])
    with pytest.raises(RankError, match=r"read different samples(?!.*digest)"):
        for rank in (first, 1 - first):
            next(iter(change(loaders[1]) if rank else loaders[0]))
    store = dist.HashStore()
    for _ in range(3):  # also if one rank is an epoch ahead
        for loader in ranks([common(data["one"])] * 2):
            assert len([*loader]) == len(loader)
    plain = Pipeline().sequential(data["one"], tail="drop").to_dict("cls").batched(4)
    for each in (common(data["one"]), plain.with_epoch(2)):
        store = dist.HashStore()
        loaders = ranks([each] * 2)
        next(iter(loaders[first]))  # one rank alone looks at a batch
        with pytest.raises(RankError, match="number of steps so far is"):
            _ = [[*loader] for loader in loaders * 2]
    store = dist.HashStore()
    loaders = ranks([plain] * 2)
    next(iter(loaders[first]))  # here, no sample depends on the epoch
    assert all([*loader] for loader in loaders * 2)


def with_epoch(sample: dict[str, Any], epoch: int) -> dict[str, Any]:
    return {**sample, "epoch": epoch}


@pytest.mark.parametrize("way", [{}, {"threads": 2}, {"workers": 1}, {"workers": 2, "threads": 2}], ids=str)
def test_function_with_a_parameter_epoch_gets_the_epoch_of_its_sample(
    data: dict[str, str], way: dict[str, int]
) -> None:
    """Also for batches that are made before their epoch begins, and after `set_epoch`."""
    pipe = Pipeline().exact(data["one"]).decode().map(with_epoch).to_tuple("epoch").batched(4)
    with pipe.loader(**{"workers": 0, **way}) as loader:
        found = [{epoch for (column,) in loader for epoch in column.tolist()} for _ in range(3)]
        loader.set_epoch(7)
        found.append({epoch for (column,) in loader for epoch in column.tolist()})
    assert found == [{0}, {1}, {2}, {7}]


def drawn(sample: dict[str, Any]) -> dict[str, Any]:
    return {"draws": np.array([random.random(), np.random.rand(), float(torch.rand(()))])}  # noqa: NPY002


def test_workers_of_another_epoch_draw_other_numbers(data: dict[str, str]) -> None:
    """Also if each epoch starts new processes."""
    pipe = Pipeline().exact(data["one"]).map(drawn).to_tuple("draws").batched(4)
    loader = pipe.loader(workers=1, persistent_workers=False)
    columns = [np.concatenate([batch.numpy() for (batch,) in loader]) for _ in range(3)]
    for column in np.concatenate(columns).T:
        assert len({*column.tolist()}) == 3 * 40


@pytest.mark.parametrize("way", [{"workers": 0}, {"workers": 1}], ids=str)
def test_program_may_change_its_folder_after_a_loader_is_made(
    data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: dict[str, int]
) -> None:
    folder = Path(data["one"])
    monkeypatch.chdir(folder.parent)
    errors = {"max_bad": 3, "dir": "bad"}
    for shards in (folder.name, f"{folder.name}/*.tar"):
        loader = Pipeline().exact(shards).batched(4).loader(**way, errors=errors)
        monkeypatch.chdir(tmp_path)
        assert sum(len(batch["__key__"]) for batch in loader) == 40
        loader.close()
        monkeypatch.chdir(folder.parent)


def test_list_of_bad_samples_names_its_pipeline(tmp_path: Path) -> None:
    """Two pipelines of one configuration may share the folder."""
    pack([{"__key__": f"{n}", "cls": n} for n in range(8)], tmp_path / "data")
    names = ("train", "val")
    stages = [{"exact": str(tmp_path / "data")}, "decode", {"map": "fail_at_3"}, {"batched": 2}]
    config = {
        "version": 1,
        "pipelines": dict.fromkeys(names, stages),
        "loader": {"workers": 0},
        "errors": {"max_bad": 1, "transforms": True, "dir": str(tmp_path / "bad")},
    }
    for name in names:
        loader = make_loader(config, pipeline=name, transforms={"fail_at_3": fail_at_3})
        assert len([*loader]) == 4
    found = {path.name: json.loads(path.read_text()) for path in (tmp_path / "bad").iterdir()}
    assert {name: record["pipeline"] for name, record in found.items()} == {
        "bad-train-rank00000.jsonl": "train",
        "bad-val-rank00000.jsonl": "val",
    }


def fail_at_3(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] == 3:
        raise ValueError("three")
    return sample


class OfLoader(torch.utils.data.IterableDataset[Any]):
    """A loader inside a dataset, as for a trainer that wants a dataset."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __iter__(self) -> Any:
        return iter(pipe_of(self.folder).loader(workers=0))


def test_loader_in_a_worker_of_torchs_data_loader_is_refused(data: dict[str, str]) -> None:
    """Each of these workers would yield all samples."""
    dataset = OfLoader(data["one"])
    assert len(list(torch.utils.data.DataLoader(dataset, batch_size=None))) == 10
    with pytest.raises(PipelineError, match="each of these workers would yield every sample"):
        list(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1))
