"""Every way in which wdskit reads a folder of shards, compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats import Samples

from wdskit import LocalShard, Pipeline, make_loader
from wdskit.dataset.samples import ShardReader
from wdskit.shards.index import index_folder
from wdskit.shards.info import info


def check_read(folder: Path, samples: Samples) -> None:
    """Read a folder of shards without an index, then with an index; check that it has `samples` in this order."""
    wanted = list(samples.items())
    paths = sorted(folder.glob("*.tar"))
    assert paths
    assert _streamed(folder) == wanted
    assert [sample for path in paths for sample in _by_small_reads(path)] == wanted
    sizes = [(key, [(name, len(data)) for name, data in fields.items()]) for key, fields in wanted]
    rows = [row for path in paths for row in info(str(path), num=len(wanted)).samples]
    assert [(row.key, list(row.fields.items())) for row in rows] == sizes
    scanned = info(str(folder))
    assert (scanned.source, scanned.num_samples) == ("scan", len(wanted))

    assert index_folder(folder, workers=1).index.num_samples == len(wanted)
    assert _streamed(folder) == wanted
    assert [sample for path in paths for sample in _by_number(path)] == wanted
    told = info(str(folder))
    assert (told.source, told.num_samples, told.num_bytes) == ("index", len(wanted), scanned.num_bytes)
    assert [field.name for field in told.fields] == [field.name for field in scanned.fields]
    assert {field.name for field in told.fields} == {name for _, fields in wanted for name in fields}


def fields_of(sample: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return key and fields of a sample of a stream."""
    return sample["__key__"], {name: data for name, data in sample.items() if not name.startswith("__")}


def _streamed(folder: Path) -> list[tuple[str, dict[str, bytes]]]:
    """Read through loaders from a builder and from a configuration, which must agree."""
    built = list(Pipeline().stream(str(folder), shuffle_shards=False).loader(workers=0))
    stream = {"stream": {"shards": f"{folder}/*.tar", "shuffle_shards": False}}
    config = {"version": 1, "pipeline": [stream], "loader": {"workers": 0}}
    assert list(make_loader(config)) == built
    return [fields_of(sample) for sample in built]


def _by_small_reads(path: Path) -> list[tuple[str, dict[str, bytes]]]:
    """Read as from a pipe that returns few bytes at a time."""
    with path.open("rb") as file:
        return [fields_of(sample) for sample in ShardReader(lambda size: file.read(min(size, 700)), shard=str(path))]


def _by_number(path: Path) -> list[tuple[str, dict[str, bytes]]]:
    """Read by random access, backwards."""
    with LocalShard(path) as shard:
        found = [
            (shard.key(number), {name: bytes(data) for name, data in shard[number].items()})
            for number in reversed(range(len(shard)))
        ]
    return found[::-1]
