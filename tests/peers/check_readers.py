"""The programs for which `--also` writes files read the shards by them; and what `verify --for` says is what they do.

`make peers` installs them, each in an environment of its own, and runs this. It is not a part of `make test`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from disks import HastyDisk
from images import image_bytes
from peers.unsafe import READERS, UNSAFE, shard

from wdskit import pack
from wdskit.dataset.grouping import ShardReader
from wdskit.shards.indexing import index_folder

HERE = Path(__file__).parent
ENVIRONMENTS = Path(sys.prefix, "peers")
KINDS = ("open_clip", "timm", "energon", "dali", "webshart", "parquet")

Sample = tuple[str, dict[str, bytes]]


def ask(reader: str, *words: str, **environment: str) -> Any:
    """What `read_with_<reader>.py` prints at the end; None where it does not come so far."""
    python = ENVIRONMENTS / reader / "bin" / "python"
    assert reader == "datasets" or python.exists(), f"{python} is not there. Run `make peers`."
    command = [str(python) if reader != "datasets" else sys.executable, "-W", "ignore"]
    options = {"env": {**os.environ, **environment}, "capture_output": True, "text": True}
    done = subprocess.run([*command, str(HERE / f"read_with_{reader}.py"), *words], check=False, timeout=600, **options)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return None


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def samples_of(path: Path) -> list[Sample]:
    with path.open("rb") as file:
        read = ShardReader(file.read, shard=str(path))
        return [(one["__key__"], {name: data for name, data in one.items() if name[:2] != "__"}) for one in read]


def hashed(samples: Sequence[Sample]) -> list[list[Any]]:
    return [[key, {name: sha256(data) for name, data in fields.items()}] for key, fields in samples]


# What `--also` writes.


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """Shards for training and validation, with every kind of file beside them."""
    folder = tmp_path_factory.mktemp("also") / "data"
    for name, start, stop in [("train", 0, 5), ("val", 5, 8)]:
        rows = [
            {"__key__": f"d/k{n}", "jpg": image_bytes(number=n), "cls": n, "txt": f"text {n}", "json": {"n": n}}
            for n in range(start, stop)
        ]
        pattern = f"{name}-%03d.tar"
        pack(rows, folder, pattern=pattern, max_samples=2, append=name == "val", **({} if start else {"also": KINDS}))
    return folder


def all_of(folder: Path, pattern: str) -> list[Sample]:
    return [sample for path in sorted(folder.glob(pattern)) for sample in samples_of(path)]


def test_energon_reads_both_parts(packed):
    [found] = ask("energon", json.dumps([{"folder": str(packed), "parts": ["train", "val"]}]))
    assert found == {part: hashed(all_of(packed, f"{part}-*.tar")) for part in ("train", "val")}


def test_dali_reads_by_its_index(packed):
    [found] = ask("dali", json.dumps([{"folder": str(packed), "fields": ["jpg", "cls", "txt", "json"]}]))
    assert [fields for _, fields in found] == [fields for _, fields in hashed(all_of(packed, "*.tar"))]


def test_webshart_reads_every_file(packed):
    [found] = ask("webshart", json.dumps([str(packed)]))
    wanted = [[f"{key}.{name}", sha256(data)] for key, one in all_of(packed, "*.tar") for name, data in one.items()]
    assert sorted(found) == sorted(wanted)


def test_timm_counts_and_reads_its_splits(packed):
    [found] = ask("timm", json.dumps([{"folder": str(packed), "splits": ["train", "val"]}]))
    assert found["train"] == {"promised": 5, "targets": [0, 1, 2, 3, 4]}
    assert found["val"] == {"promised": 3, "targets": [5, 6, 7]}


def test_open_clip_counts_and_reads(packed):
    [found] = ask("open_clip", json.dumps([f"{packed}/train-{{000..002}}.tar"]))
    assert found == {"promised": 5, "num_shards": 3, "texts": [f"text {n}" for n in range(5)]}


def test_wids_reads_by_the_index(packed, tmp_path):
    [found] = ask("wids", str(tmp_path), str(packed / "index.json"))
    assert found == hashed(all_of(packed, "*.tar"))


# What `verify --for` says.


@pytest.fixture(params=UNSAFE)
def unsafe(request, tmp_path) -> tuple[str, Path]:
    """A shard of `peers.unsafe` with every file that readers want."""
    (tmp_path / "s-0.tar").write_bytes(shard(request.param))
    index_folder(tmp_path, also=["open_clip", "timm", "energon"], disk=HastyDisk())
    return request.param, tmp_path


def test_a_reader_fails_where_it_was_said_to_and_nowhere_else(unsafe):
    name, folder = unsafe
    samples = samples_of(folder / "s-0.tar")
    failed = {reader for reader in READERS if not CHECKS[reader](folder, samples)}
    if "dali" in UNSAFE[name].readers:
        assert failed | {"dali"} == UNSAFE[name].readers  # without an index, or with that of its own tool
        assert "dali" in failed or not dali(folder, samples, index="theirs")
    else:
        assert failed == UNSAFE[name].readers
    index_folder(folder, also=["dali"], disk=HastyDisk())
    assert dali(folder, samples, index="ours") == (name != "upper case")


def dali(folder: Path, samples: Sequence[Sample], index: str = "none") -> bool:
    fields = list(dict.fromkeys(name for _, one in samples for name in one))
    if index == "theirs":
        python = ENVIRONMENTS / "dali" / "bin" / "wds2idx"
        words = [str(python.with_name("python")), str(python), str(folder / "s-0.tar"), str(folder / "s-0.idx")]
        subprocess.run(words, check=True, capture_output=True)
    found = ask("dali", json.dumps([{"folder": str(folder), "fields": fields, "index": index != "none"}]))
    (folder / "s-0.idx").unlink(missing_ok=True)
    read = found[0] if found else None
    return isinstance(read, list) and [one for _, one in read] == [one for _, one in hashed(samples)]


def energon(folder: Path, samples: Sequence[Sample]) -> bool:
    found = ask("energon", json.dumps([{"folder": str(folder), "parts": ["train"]}]))
    return bool(found) and found[0].get("train") == hashed(samples)


def wids(folder: Path, samples: Sequence[Sample]) -> bool:
    return ask("wids", str(folder / "cache"), str(folder / "index.json")) == [hashed(samples)]


def timm(folder: Path, samples: Sequence[Sample]) -> bool:
    found = ask("timm", json.dumps([{"folder": str(folder), "splits": ["train"]}]))
    targets = [int(one["cls"]) if one.get("cls", b"").isdigit() else None for _, one in samples]
    return bool(found) and found[0].get("train") == {"promised": len(samples), "targets": targets}


def open_clip(folder: Path, samples: Sequence[Sample]) -> bool:
    found = ask("open_clip", json.dumps([str(folder / "s-0.tar")]))
    texts = [one.get("txt", b"").decode(errors="replace") for _, one in samples]
    return bool(found) and found[0] == {"promised": len(samples), "num_shards": 1, "texts": texts}


def hf(folder: Path, samples: Sequence[Sample]) -> bool:
    places = {"HF_HOME": str(folder / "hf"), "HF_DATASETS_CACHE": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    found = ask("datasets", json.dumps([[str(folder / "s-0.tar")]]), **places)
    columns = {name for _, one in samples for name in one}
    try:
        rows = [{**dict.fromkeys(columns), **values(one), "__key__": key} for key, one in samples]
    except ValueError:
        return False
    return bool(found) and found[0] == {"streamed": rows, "loaded": rows}


def values(fields: dict[str, bytes]) -> dict[str, Any]:
    decoders = {"json": json.loads, "cls": int, "txt": bytes.decode}
    return {name: decoders.get(name, sha256)(data) for name, data in fields.items()}


CHECKS = {"hf": hf, "dali": dali, "energon": energon, "wids": wids, "timm": timm, "open_clip": open_clip}
