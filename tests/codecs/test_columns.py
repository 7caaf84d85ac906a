"""A batch made by columns equals the batch made sample by sample."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_columns import count_made, forgo_columns
from hypothesis import given
from hypothesis import strategies as st
from masks import mask_of
from shards import npy, write_shard

from wdskit import Pipeline
from wdskit.codecs.columns import NpyColumn, RawColumn, decode_column
from wdskit.codecs.fields import decode_field
from wdskit.errors import DecodeError
from wdskit.native import native
from wdskit.shards.index import index_folder


def fields_of(number: int) -> dict[str, bytes]:
    """Return a sample with a field of each kind."""
    array = np.arange(number, number + 6, dtype=np.float32).reshape(2, 3)
    return {
        "bin": bytes([number % 256]) * (number * 37 % 700),
        "cls": b"%d" % (number % 7 - 3),
        "json": json.dumps({"n": number, "f": number / 3, "text": "\u00e4" * (number % 3)}).encode(),
        "n.json": b"%d" % number,
        "npy": npy(array),
        "i.npy": npy(np.asfortranarray(array.astype(">i2"))),
        "png": b"no image",
        "txt": f"text {number} \u00e9".encode(),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("columns")
    for shard, numbers in enumerate((range(10), range(10, 21), range(21, 33))):
        write_shard(path / f"s-{shard}.tar", {f"k{at:03d}": fields_of(at) for at in numbers})
    index_folder(path, workers=1)
    return path


def equal(a: Any, b: Any) -> bool:
    """Return whether types, order of keys, dtypes, memory layouts and values are equal."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and str(a) == str(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return [*a] == [*b] and all(map(equal, a.values(), b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def both(pipe: Pipeline, **options: Any) -> tuple[list[Any], list[Any], int]:
    """Return an epoch by columns, the epoch sample by sample, and the number of batches made by columns."""
    loader, apart = (pipe.loader(workers=0, **options) for _ in range(2))
    made = count_made(loader.program)
    by_columns = list(loader)
    forgo_columns(apart.program)
    return by_columns, list(apart), sum(made)


def check(pipe: Pipeline, **options: Any) -> None:
    by_columns, apart, num_made = both(pipe, **options)
    assert equal(by_columns, apart)
    assert by_columns
    assert num_made == (len(by_columns) if native() else 0)


def batch_keys(batch):
    return batch["__key__"], batch["cls"]


def batch_draw(batch, rng):
    return batch["__key__"], int(rng.integers(1 << 40))


PIPES: dict[str, Callable[[Pipeline], Pipeline]] = {
    "bytes": lambda p: p.batched(4),
    "decode": lambda p: p.decode().batched(5),
    "only": lambda p: p.decode(only=["json", "npy"]).batched(4),
    "twice": lambda p: p.decode(only="cls").decode(only="json").batched(4),
    "tuple": lambda p: (
        p.decode().to_tuple("nothing;json", "cls", "__key__", "cls", "npy", "npy", *mask_of(p)).batched(4)
    ),
    "raw tuple": lambda p: p.to_tuple("__url__", "bin", "bin", *mask_of(p)).batched(4),
    "dict": lambda p: p.decode().to_dict("x;npy", "n.json", "__key__").batched(4),
    "rename": lambda p: p.rename(text="json", image="x;npy").decode().batched(4),
    "rename behind": lambda p: p.decode().rename(seg="npy", **{"a.b": "i.npy"}).to_dict("seg", "a.b").batched(4),
    "behind": lambda p: p.decode().batched(4).map(batch_keys),
    "draws behind": lambda p: p.batched(4).map(batch_draw),
}


@pytest.mark.parametrize("name", PIPES)
@pytest.mark.parametrize("source", ["exact", "sequential", "resampled"])
def test_every_kind_of_pipeline(folder: Path, name: str, source: str) -> None:
    for tail in ("drop", "pad"):
        check(PIPES[name](getattr(Pipeline(), source)(str(folder), tail=tail)))


ODD_ARRAYS = [
    np.zeros((0, 3)), np.float32(2), np.array(["a", "b"]), np.zeros(2, dtype=[("a", "i4")]), np.zeros(3, dtype=bool),
    np.zeros(3, dtype=np.complex64), np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(3, dtype=">u2"),
]  # fmt: skip
ODD = [b"NaN", b"\xef\xbb\xbf[]", b"+7", b" 7\n", b"007", b"1" * 5000, "\u20ac".encode(), *map(npy, ODD_ARRAYS)]


@given(
    field=st.sampled_from(["json", "cls", "txt", "npy", "bin", "a.JSON"]),
    values=st.lists(
        st.one_of(
            st.binary(max_size=9),
            st.integers(-(10**25), 10**25).map(lambda n: b"%d" % n),
            st.builds(json.dumps, st.recursive(st.integers() | st.floats(), st.lists, max_leaves=4)).map(str.encode),
            st.integers(0, 3).map(lambda n: npy(np.arange(n))),
            st.sampled_from(ODD),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_a_column_is_decoded_as_its_values_are(field: str, values: list[bytes]) -> None:
    try:
        alone: Any = [decode_field(field, value) for value in values]
    except DecodeError as err:
        alone = str(err)
    try:
        found = decode_column(field, RawColumn(values))
        found = found.arrays() if isinstance(found, NpyColumn) else found
    except DecodeError as err:
        found = str(err)
    assert repr(found) == repr(alone)
