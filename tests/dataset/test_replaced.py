"""A shard that was replaced after indexing gives an error, never a partial sample or fields of another sample."""

from __future__ import annotations

import io
import itertools
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from wdskit import Pipeline
from wdskit.dataset.index import read_index
from wdskit.dataset.samples import ShardReader
from wdskit.dataset.shard import LocalShard
from wdskit.errors import WdskitError
from wdskit.shards.index import index_folder
from wdskit.storage.urls import LocalFile

FORMATS: dict[str, dict[str, Any]] = {
    "plain": {"format": tarfile.USTAR_FORMAT},
    "pax": {"format": tarfile.PAX_FORMAT},  # a float mtime needs a header per member, as webdataset's writer has
    "gnu": {"format": tarfile.GNU_FORMAT},
}
KEYS = {"plain": "n{}", "pax": "n{}", "gnu": "n" * 120 + "{}"}
FIELDS = ["a", "b", "c"]


def shard_bytes(kind: str, groups: Iterable[int], size: int) -> bytes:
    """Return a shard of members of one size; each of `groups` is the number of members of a sample."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", **FORMATS[kind]) as tar:
        for sample, count in enumerate(groups):
            for field in FIELDS[:count]:
                info = tarfile.TarInfo(f"{KEYS[kind].format(sample)}.{field}")
                info.size, info.mtime = size, 1.5 if kind == "pax" else 1
                tar.addfile(info, io.BytesIO(f"{sample}{field}".encode() * (size // 2)))
    return stream.getvalue()


def replace_in_place(path: Path, data: bytes) -> None:
    """Write other bytes; all metadata of the file system stay the same."""
    before = path.stat()
    assert len(data) == before.st_size
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def groupings(num_members: int) -> list[tuple[int, ...]]:
    """Return all ways to divide this number of members into samples of 1 to 3 members."""
    sizes = range(1, num_members + 1)
    return [one for length in sizes for one in itertools.product((1, 2, 3), repeat=length) if sum(one) == num_members]


def samples_of(path: Path) -> list[dict[str, bytes]]:
    file = LocalFile(str(path))
    found = [{k: v for k, v in sample.items() if k != "__url__"} for sample in ShardReader(file.read, shard=str(path))]
    file.close()
    return found


@pytest.mark.parametrize("size", [10, 40_000], ids=["small", "large"])
@pytest.mark.parametrize("kind", FORMATS)
def test_no_sample_of_a_regrouped_shard_is_a_half_one(tmp_path, kind, size):
    """All pairs of groupings of four members; each sample is read as the first sample of an open shard."""
    shards = {groups: shard_bytes(kind, groups, size) for groups in groupings(4)}
    path = tmp_path / "s.tar"
    num_wrong = 0
    for old, new in itertools.permutations(shards, 2):
        path.write_bytes(shards[old])
        index_folder(tmp_path, workers=1)
        [entry] = read_index(tmp_path).entries
        replace_in_place(path, shards[new])
        whole = samples_of(path)
        for number in range(len(old)):
            with LocalShard(path, idx_sha256=entry.idx_sha256) as shard:
                try:
                    key, fields = shard.read(number)
                except WdskitError:
                    num_wrong += 1
                    continue
                assert {"__key__": key, **{name: bytes(view) for name, view in fields.items()}} in whole
            if size < 100:
                check_pipeline(tmp_path, number, whole)
    assert num_wrong


def check_pipeline(folder: Path, first: int, whole: list[dict[str, bytes]]) -> None:
    """Read one sample, and all from that one on, by columns and one by one."""
    base = Pipeline().sequential(str(folder), range=[first, "100%"])
    for pipe in (base.batched(2), base.map(dict).batched(4)):
        try:
            for batch in pipe.loader(workers=0):
                valid = batch.pop("__valid__").tolist()
                rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
                for row, is_sample in zip(rows, valid, strict=True):
                    row.pop("__url__")
                    assert not is_sample or row in whole
        except WdskitError:
            continue
