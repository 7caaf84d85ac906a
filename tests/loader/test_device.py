"""Moving batches to a device: in order, ahead of the consumer, and without a thread left. The tests replace the few
calls of torch that need a GPU.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from leaks import open_things, opened_since
from shards import fail_on_7, number_of, write_pictures
from torch.nn.utils.rnn import pack_padded_sequence

from wdskit import Pipeline, PipelineError, Ragged, SampleError
from wdskit.engine.batch import Batch
from wdskit.loader import device
from wdskit.loader import loader as planned_module
from wdskit.loader.device import make_mover, map_tensors, move_ahead
from wdskit.pipeline.settings import LoaderSpec
from wdskit.shards.index import index_folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, [20, 0, 13])
    index_folder(folder)
    return str(folder)


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


def test_no_more_is_taken_than_two_ahead_and_only_what_is_ready():
    taken = []

    def source() -> Iterator[torch.Tensor]:
        for number in range(10):
            taken.append(number)
            yield torch.tensor(number)

    batches = move_ahead(source(), Times10(), lambda: True)
    assert next(batches) == 0
    assert taken == [0, 1, 2]
    assert [int(batch) for batch in batches] == [*range(10, 100, 10)]
    taken.clear()
    batches = move_ahead(source(), Times10(), lambda: False)
    assert next(batches) == 0
    assert taken == [0]
    assert [int(batch) for batch in batches] == [*range(10, 100, 10)]


def test_an_error_comes_behind_the_batches_before_it(numbers, monkeypatch):
    pipe = Pipeline().sequential(numbers).map(fail_on_7).batched(3)
    loader = loader_with(Times10(), monkeypatch, pipe, workers=0, threads=2)
    seen = []
    with pytest.raises(SampleError, match="n000007"):
        for batch in loader:
            seen += map(int, batch["cls"])
    assert seen == list(range(6))


class Pair(NamedTuple):
    one: Any
    two: Any


def test_every_tensor_of_a_batch_is_found():
    value = {"a": torch.ones(2), "b": [torch.ones(1), "text"], "c": (torch.ones(1), None), "d": Pair(torch.ones(3), 5)}
    found = map_tensors(value, lambda tensor: tensor + 1)
    assert [t.sum().item() for t in (found["a"], found["b"][0], found["c"][0], found["d"].one)] == [4, 2, 2, 6]
    ragged = map_tensors(Ragged(torch.ones(3), torch.tensor([0, 1, 3])), lambda tensor: tensor + 1)
    assert (ragged.values.tolist(), ragged.offsets.tolist()) == ([2, 2, 2], [1, 2, 4])
    assert (found["b"][1], found["c"][1], type(found["d"]), found["d"].two) == ("text", None, Pair, 5)


class Encoding(UserDict):
    """A mapping like transformers' BatchEncoding, whose other attributes must be kept."""

    def __init__(self, data: dict[str, Any], encodings: list[str]) -> None:
        super().__init__(data)
        self.encodings = encodings


class ReadOnly(Mapping):
    """A mapping that cannot change."""

    def __init__(self, *, items: dict[str, Any]) -> None:
        self.items_of = items

    def __getitem__(self, name: str) -> Any:
        return self.items_of[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


TYPES = {
    "dict": lambda tensor: {"a": tensor},
    "OrderedDict": lambda tensor: OrderedDict(a=tensor),
    "defaultdict": lambda tensor: defaultdict(list, a=tensor),
    "BatchEncoding": lambda tensor: Encoding({"a": tensor}, ["kept"]),
    "namedtuple": lambda tensor: Pair(tensor, "text"),
    "list of mappings": lambda tensor: [Encoding({"a": tensor}, ["kept"])],
    "batch": lambda tensor: Batch([tensor], 1),
    "PackedSequence": lambda tensor: pack_padded_sequence(tensor, torch.tensor([2, 1]), batch_first=True),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_batch_keeps_its_type_on_its_way_to_a_device(name):
    value = TYPES[name](torch.ones(2, 3))
    moved = map_tensors(value, lambda tensor: tensor.to("meta"), own=lambda each: each.to("meta"))
    assert type(moved) is type(value)
    assert repr(tensors_of(value)).count("cpu") == repr(tensors_of(moved)).count("meta") == 1
    if name == "BatchEncoding":
        assert moved.encodings == ["kept"]


def tensors_of(value: Any) -> list[torch.device]:
    found: list[torch.device] = []
    map_tensors(
        value, lambda tensor: found.append(tensor.device) or tensor, own=lambda each: found.append(each[0].device)
    )
    return found


def test_a_mapping_that_cannot_change_becomes_a_dict():
    moved = map_tensors(ReadOnly(items={"a": torch.ones(2)}), lambda tensor: tensor + 1)
    assert type(moved) is dict
    assert moved["a"].tolist() == [2, 2]


def test_a_device_that_is_not_there_is_refused(numbers):
    pipe = Pipeline().exact(numbers).batched(2)
    with pytest.raises(PipelineError, match=r"^device: cuda, but torch sees 0 CUDA devices here\.\n  Leave"):
        pipe.loader(device="cuda")
    with pytest.raises(PipelineError, match=r"^device: a stream's"):
        Pipeline().stream(f"{numbers}/s-*.tar").loader(device="cuda")


# --- calls of torch for a device


class FakeCuda:
    """A stand-in for torch.cuda that stores all operations and their streams."""

    def __init__(self, monkeypatch) -> None:
        self.seen: list[str] = []
        self.current = "consumer"
        side = SimpleNamespace(record_event=lambda: self.seen.append("event") or "event")
        consumer = SimpleNamespace(wait_event=lambda event: self.seen.append(f"{self.current} waits for {event}"))
        fakes = {
            "device_count": lambda: 2,
            "is_available": lambda: True,
            "current_device": lambda: 1,
            "Stream": lambda device: self.seen.append(f"stream on {device}") or side,
            "stream": lambda _: self,
            "current_stream": lambda _: consumer,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(device, "pinned", lambda tensor: self.seen.append("pinned") or Moving(tensor, self))

    def __enter__(self) -> None:
        self.current = "side"

    def __exit__(self, *_: object) -> None:
        self.current = "consumer"


class Moving:
    def __init__(self, tensor: torch.Tensor, cuda: FakeCuda) -> None:
        self.tensor = tensor
        self.cuda = cuda

    def to(self, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        self.cuda.seen.append(f"{self.cuda.current} copies to {device}")
        return self.tensor


def test_a_batch_is_copied_on_a_stream_of_its_own_and_the_consumer_waits_for_it(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    for name, shown in (("cuda", "cuda:1"), ("cuda:0", "cuda:0")):
        cuda.seen.clear()
        mover = make_mover(LoaderSpec(device=name))
        assert mover is not None
        sent = mover.send(Batch((torch.zeros(2, 3, 4, 4, dtype=torch.uint8),), 2))
        received = mover.receive(sent)
        assert received.value[0].dtype == torch.uint8
        assert cuda.seen == [
            f"stream on {shown}",
            "pinned",
            f"side copies to {shown}",
            "event",
            "consumer waits for event",
        ]


def test_without_a_device_batches_are_pinned_where_there_is_one(monkeypatch):
    assert make_mover(LoaderSpec(pin_memory=True)) is None
    cuda = FakeCuda(monkeypatch)
    mover = make_mover(LoaderSpec(pin_memory=True))
    assert mover is not None
    mover.receive(mover.send(Batch([torch.zeros(3)], 3)))
    assert cuda.seen == ["pinned"]
