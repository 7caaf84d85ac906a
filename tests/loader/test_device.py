"""Moving batches to a device: in order, ahead of the consumer, and without a thread left. The tests replace the few
calls of torch that need a GPU.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from leaks import open_things, opened_since
from shards import number_of
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from wdskit import Pipeline, PipelineError, Ragged
from wdskit.engine.batch import Batch
from wdskit.loader import loader as planned_module
from wdskit.loader.device import map_tensors


class Times10:
    """A stand-in for a device: it returns values times ten, and stores the thread that moved them."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.num_sent = 0

    def send(self, value: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        self.num_sent += 1
        return map_tensors(value, lambda tensor: tensor * 10)

    def receive(self, sent: Any) -> Any:
        assert threading.current_thread() is threading.main_thread()
        return sent


def loader_with(mover: Any, monkeypatch, pipe: Pipeline, **settings: Any) -> Any:
    monkeypatch.setattr(planned_module, "make_mover", lambda _: mover)
    return pipe.loader(**settings)


@pytest.mark.parametrize("way", [{"workers": 0}, {"workers": 0, "threads": 3}, {"workers": 2}], ids=str)
def test_batches_are_moved_in_order_in_a_thread_of_its_own(numbers, monkeypatch, way):
    pipe = Pipeline().exact(numbers, seed=3).map(number_of).batched(3)
    expected = [batch.tolist() for _ in range(2) for batch in [*pipe.loader(workers=0)]]
    mover = Times10()
    loader = loader_with(mover, monkeypatch, pipe, **way)
    found = [(batch // 10).tolist() for _ in range(2) for batch in loader]
    assert [*map(sorted, found[:13])] == [*map(sorted, expected[:13])]
    assert found[:13] == expected[:13]
    assert mover.threads == {"wdskit-device_0"}


def test_it_stands_where_the_consumer_stands_and_leaves_nothing(numbers, monkeypatch):
    """A state counts delivered batches, not batches that were moved ahead."""
    pipe = Pipeline().exact(numbers, seed=3).map(number_of).batched(3)
    whole = [batch.tolist() for batch in pipe.loader(workers=0)]
    loader = loader_with(Times10(), monkeypatch, pipe, workers=0, threads=2)
    list(loader)
    before = open_things()
    for stop in range(1, 13):
        loader.set_epoch(0)
        batches = iter(loader)
        seen = [(next(batches) // 10).tolist() for _ in range(stop)]
        state = loader.state_dict()
        del batches
        assert not opened_since(before)
        loader.load_state_dict(state)
        assert seen + [(batch // 10).tolist() for batch in loader] == whole


class Pair(NamedTuple):
    one: Any
    two: Any


class Encoding(UserDict):
    """A mapping like transformers' BatchEncoding, whose other attributes must be kept."""

    def __init__(self, data: dict[str, Any], encodings: list[str]) -> None:
        super().__init__(data)
        self.encodings = encodings


TYPES = {
    "dict": lambda tensor: {"a": tensor},
    "OrderedDict": lambda tensor: OrderedDict(a=tensor),
    "defaultdict": lambda tensor: defaultdict(list, a=tensor),
    "BatchEncoding": lambda tensor: Encoding({"a": tensor}, ["kept"]),
    "namedtuple": lambda tensor: Pair(tensor, "text"),
    "list of mappings": lambda tensor: [Encoding({"a": tensor}, ["kept"])],
    "batch": lambda tensor: Batch([tensor], 1),
    "Ragged": lambda tensor: Ragged(tensor, torch.tensor([0, 1, 2])),
    "PackedSequence": lambda tensor: pack_padded_sequence(tensor, torch.tensor([2, 1]), batch_first=True),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_batch_keeps_its_type_on_its_way_to_a_device(name):
    value = TYPES[name](torch.ones(2, 3))
    moved = map_tensors(value, lambda tensor: tensor.to("meta"))
    assert type(moved) is type(value)
    assert {each.type for each in tensors_of(value)} == {"cpu"}
    assert {each.type for each in tensors_of(moved)} == {"meta"}
    if name == "BatchEncoding":
        assert moved.encodings == ["kept"]


def tensors_of(value: Any) -> list[torch.device]:
    found: list[torch.device] = []

    def note(tensor: Any) -> Any:
        found.extend([tensor.values.device] if isinstance(tensor, Ragged) else [])
        found.extend([tensor[0].device] if isinstance(tensor, PackedSequence) else [])
        found.extend([tensor.device] if isinstance(tensor, torch.Tensor) else [])
        return tensor

    map_tensors(value, note)
    return found


def test_a_device_that_is_not_there_is_refused(numbers):
    pipe = Pipeline().exact(numbers).batched(2)
    with pytest.raises(PipelineError, match=r"^device: cuda, but torch sees 0 CUDA devices here\.\n  Leave"):
        pipe.loader(device="cuda")
    with pytest.raises(PipelineError, match=r"^device: a stream's"):
        Pipeline().stream(f"{numbers}/s-*.tar").loader(device="cuda")


# --- calls of torch for a device
