"""Other readers read our shards, with the files that they need next to them, and behave as docs/formats.md says.

`make long` installs the readers, each in an environment of its own, and runs these tests; `make test` does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from disks import HastyDisk, on
from images import image_bytes
from tar_corpus import END, V7, header, long_name, member, pax, record

from wdskit import pack
from wdskit.dataset.index import read_index
from wdskit.dataset.samples import ShardReader
from wdskit.shards.index import index_folder

HERE = Path(__file__).parent
ENVIRONMENTS = Path(sys.prefix, "peers")

Sample = tuple[str, dict[str, bytes]]


def ask(reader: str, *words: str, **environment: str) -> Any:
    """Return the last output of `read_with_<reader>.py`; None if the script fails before that."""
    python = ENVIRONMENTS / reader / "bin" / "python"
    assert reader == "datasets" or python.exists(), f"{python} is not there. Run `make long WHAT=peers`."
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


# Shards for training and validation.


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """Shards for training and validation, with the files of other readers."""
    folder = tmp_path_factory.mktemp("readers") / "data"
    for name, start, stop in [("train", 0, 5), ("val", 5, 8)]:
        rows = [
            {"__key__": f"d/k{n}", "jpg": image_bytes(number=n), "cls": n, "txt": f"text {n}", "json": {"n": n}}
            for n in range(start, stop)
        ]
        pack(rows, folder, split={name: 1}, max_samples=2, append=name == "val")
    write_files(folder)
    return folder


def write_files(folder: Path) -> None:
    """Write sizes.json and _info.json as docs/recipes.md does, and the files that `energon prepare` would write."""
    counts = {one.name: one.num_samples for one in read_index(folder).entries}
    (folder / "sizes.json").write_text(json.dumps(counts))
    splits: dict[str, dict[str, int]] = {}
    for name, num in counts.items():
        splits.setdefault("val" if name.startswith("val") else "train", {})[name] = num
    info = {
        split: {
            "name": split,
            "num_samples": sum(own.values()),
            "filenames": [*own],
            "shard_lengths": [*own.values()],
            "alt_label": "",
        }
        for split, own in splits.items()
    }
    (folder / "_info.json").write_text(json.dumps({"splits": info}))
    meta = folder / ".nv-meta"
    meta.mkdir()
    filled = {name: num for name, num in counts.items() if num}  # energon refuses empty shards
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": filled}))
    parts = {split: [name for name in splits.get(split, ()) if name in filled] for split in ("train", "val", "test")}
    (meta / "split.yaml").write_text(json.dumps({"split_parts": parts, "exclude": []}))  # JSON is YAML
    (meta / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")


def all_of(folder: Path, pattern: str) -> list[Sample]:
    return [sample for path in sorted(folder.glob(pattern)) for sample in samples_of(path)]


def test_energon_reads_both_parts(packed):
    [found] = ask("energon", json.dumps([{"folder": str(packed), "parts": ["train", "val"]}]))
    assert found == {part: hashed(all_of(packed, f"{part}-*.tar")) for part in ("train", "val")}


def test_dali_reads(packed):
    [found] = ask(
        "dali", json.dumps([{"folder": str(packed), "fields": ["jpg", "cls", "txt", "json"], "index": False}])
    )
    assert [fields for _, fields in found] == [fields for _, fields in hashed(all_of(packed, "*.tar"))]


def test_timm_counts_and_reads_its_splits(packed):
    [found] = ask("timm", json.dumps([{"folder": str(packed), "splits": ["train", "val"]}]))
    assert found["train"] == {"promised": 5, "targets": [0, 1, 2, 3, 4]}
    assert found["val"] == {"promised": 3, "targets": [5, 6, 7]}


def test_open_clip_counts_and_reads(packed):
    [found] = ask("open_clip", json.dumps([f"{packed}/train-{{000000..000002}}.tar"]))
    assert found == {"promised": 5, "num_shards": 3, "texts": [f"text {n}" for n in range(5)]}


def test_wids_reads_by_the_index(packed, tmp_path):
    [found] = ask("wids", str(tmp_path), str(packed / "index.json"))
    assert found == hashed(all_of(packed, "*.tar"))


# Statements of docs/formats.md: shards that break a rule of a reader, with the readers that cannot read them.

READERS = ("hf", "dali", "energon", "wids", "open_clip", "timm")
FIELDS = {"jpg": image_bytes("JPEG"), "cls": b"1", "json": b'{"n": 1}', "txt": b"x"}


def sample(key: str, *, without: str = "", **options) -> bytes:
    """Return one sample with all fields; `options` are those of its headers."""
    return b"".join(member(f"{key}.{name}", data, **options) for name, data in FIELDS.items() if name != without)


def each(make: Callable[[bytes, bytes], bytes], key: str = "b") -> bytes:
    """Return one sample, each member made by a function of its name and data."""
    return b"".join(make(f"{key}.{name}".encode(), data) for name, data in FIELDS.items())


def jsons(*documents: bytes) -> bytes:
    return b"".join(
        member(f"{n}.jpg", FIELDS["jpg"])
        + member(f"{n}.cls", b"1")
        + member(f"{n}.json", data)
        + member(f"{n}.txt", b"x")
        for n, data in enumerate(documents)
    )


class Case(NamedTuple):
    """The members of a shard, and the readers that cannot read it."""

    data: bytes
    readers: set[str]


LONG = "n" * 120

UNSAFE: dict[str, Case] = {
    "plain": Case(sample("a"), set()),
    "not ASCII": Case(sample("\u00e9") + sample("\u96ea/\u00e4"), set()),
    "100 bytes": Case(sample("n" * 95), set()),
    "pax path": Case(each(lambda name, data: pax(record(b"path", name)) + member("x", data)), {"dali", "wids"}),
    "pax time": Case(each(lambda name, data: pax(record(b"mtime", b"1.5")) + member(name, data)), set()),
    "GNU long name": Case(each(lambda name, data: long_name(name) + member(name[:100], data), LONG), {"dali", "wids"}),
    "prefix": Case(sample("a", prefix=b"folder"), {"wids"}),
    "GNU magic": Case(sample("a", magic=b"ustar  \0"), set()),
    "12 digits": Case(each(lambda name, data: member(name, data, size=b"%012o" % len(data))), {"dali", "wids"}),
    "base 256": Case(
        each(lambda name, data: member(name, data, size=b"\x80" + len(data).to_bytes(11, "big"))), {"dali", "wids"}
    ),
    "a space": Case(sample("a b"), {"dali"}),
    "a folder with a dot": Case(sample("v1.2/a"), set()),
    "a leading ./": Case(sample("./a"), {"hf", "energon", "wids"}),
    "a control character": Case(sample("a\x1b"), set()),
    "a line end": Case(sample("a\nb"), {"wids"}),
    "v7": Case(sample("a", magic=V7), set()),
    "upper case": Case(sample("a", without="jpg") + member("a.JPG", FIELDS["jpg"]), {"hf", "dali", "energon", "wids"}),
    "README": Case(member("README", b"x") + sample("a"), {"dali"}),
    "a dot file": Case(member(".DS_Store", b"x") + sample("a"), {"dali", "wids"}),
    "__meta__": Case(member("__meta__/x.json", b"{}") + sample("a"), {"hf", "dali", "wids"}),
    "a directory": Case(header(b"folder/", kind=b"5") + sample("a"), set()),
    "a global header": Case(pax(record(b"comment", b"x"), kind=b"g") + sample("a"), set()),
    "cls is no integer": Case(sample("a", without="cls") + member("a.cls", b"one"), {"hf", "open_clip", "timm"}),
    "txt is no UTF-8": Case(sample("a", without="txt") + member("a.txt", b"\xff"), {"hf", "open_clip"}),
    "json changes its type": Case(jsons(*[b'{"a": 1}'] * 6, b'{"a": "x"}'), {"hf"}),
    "json is none": Case(jsons(b"{"), {"hf", "open_clip"}),
    "a late field": Case(b"".join(sample(f"{n}", without="json" if n < 5 else "") for n in range(7)), {"hf"}),
    "fields differ": Case(sample("a", without="json") + sample("b"), {"hf"}),
    "no label": Case(sample("a", without="cls"), {"timm"}),
    "no text": Case(sample("a", without="txt"), {"open_clip"}),
}


class Shard(NamedTuple):
    """A shard of `UNSAFE` with the files of other readers but DALI's index, and its samples."""

    folder: Path
    samples: list[Sample]

    @property
    def path(self) -> str:
        return str(self.folder / "s-0.tar")


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> dict[str, Shard]:
    root = tmp_path_factory.mktemp("unsafe")
    made = {}
    for number, name in enumerate(UNSAFE):
        folder = root / f"{number}"
        folder.mkdir()
        (folder / "s-0.tar").write_bytes(UNSAFE[name].data + END)
        on(HastyDisk(), index_folder, folder)
        write_files(folder)
        made[name] = Shard(folder, samples_of(folder / "s-0.tar"))
    return made


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_fails_where_it_was_said_to_and_nowhere_else(shards, reader):
    """DALI runs without an index, or with the index of its own tool."""
    right = CHECKS[reader](list(shards.values()))
    assert len(right) == len(UNSAFE)
    failed = {name for name, is_right in zip(shards, right, strict=True) if not is_right}
    assert failed == {name for name, case in UNSAFE.items() if reader in case.readers}


def dali(shards: Sequence[Shard]) -> list[bool]:
    alone = dali_by(shards, with_index=False)
    python, tool = (str(ENVIRONMENTS / "dali" / "bin" / name) for name in ("python", "wds2idx"))
    for one in shards:
        subprocess.run([python, tool, one.path, one.path[:-4] + ".idx"], check=True, capture_output=True)
    by_its_own = dali_by(shards, with_index=True)
    for one in shards:
        Path(one.path[:-4] + ".idx").unlink()
    return [a and b for a, b in zip(alone, by_its_own, strict=True)]


def dali_by(shards: Sequence[Shard], *, with_index: bool) -> list[bool]:
    jobs = [
        {
            "folder": str(one.folder),
            "fields": list(dict.fromkeys(name for _, fields in one.samples for name in fields)),
            "index": with_index,
        }
        for one in shards
    ]
    wanted = [[fields for _, fields in hashed(one.samples)] for one in shards]
    found = ask("dali", json.dumps(jobs))
    return [
        isinstance(read, list) and [fields for _, fields in read] == want
        for read, want in zip(found, wanted, strict=True)
    ]


def energon(shards: Sequence[Shard]) -> list[bool]:
    found = ask("energon", json.dumps([{"folder": str(one.folder), "parts": ["train"]} for one in shards]))
    return [read.get("train") == hashed(one.samples) for one, read in zip(shards, found, strict=True)]


def wids(shards: Sequence[Shard]) -> list[bool]:
    cache = str(shards[0].folder / "cache")
    found = ask("wids", cache, *(str(one.folder / "index.json") for one in shards))
    return [read == hashed(one.samples) for one, read in zip(shards, found, strict=True)]


def timm(shards: Sequence[Shard]) -> list[bool]:
    found = ask("timm", json.dumps([{"folder": str(one.folder), "splits": ["train"]} for one in shards]))
    right = []
    for one, read in zip(shards, found, strict=True):
        targets = [
            int(label) if label.isdigit() else None for label in (each.get("cls", b"") for _, each in one.samples)
        ]
        right.append(read.get("train") == {"promised": len(one.samples), "targets": targets})
    return right


def open_clip(shards: Sequence[Shard]) -> list[bool]:
    found = ask("open_clip", json.dumps([one.path for one in shards]))
    right = []
    for one, read in zip(shards, found, strict=True):
        texts = [each.get("txt", b"").decode(errors="replace") for _, each in one.samples]
        right.append(read == {"promised": len(one.samples), "num_shards": 1, "texts": texts})
    return right


def hf(shards: Sequence[Shard]) -> list[bool]:
    home = str(shards[0].folder / "hf")
    places = {"HF_HOME": home, "HF_DATASETS_CACHE": home, "HF_HUB_OFFLINE": "1"}
    found = ask("datasets", json.dumps([[one.path] for one in shards]), **places)
    return [read == {"streamed": rows, "loaded": rows} for rows, read in zip(map(as_rows, shards), found, strict=True)]


def as_rows(one: Shard) -> list[dict[str, Any]] | None:
    """Return the samples as `datasets` reads them; None for a value that does not fit its name."""
    decoders = {"json": json.loads, "cls": int, "txt": bytes.decode}
    columns = {name for _, fields in one.samples for name in fields}
    try:
        return [
            {
                **dict.fromkeys(columns),
                **{name: decoders.get(name, sha256)(data) for name, data in fields.items()},
                "__key__": key,
            }
            for key, fields in one.samples
        ]
    except ValueError:
        return None


CHECKS = {"hf": hf, "dali": dali, "energon": energon, "wids": wids, "timm": timm, "open_clip": open_clip}
