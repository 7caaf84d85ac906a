"""Other programs read what wdskit writes, and wdskit what they write, with equal content."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from images import image_bytes, make_folder

from wdskit import LocalShard, Pipeline, make_loader, pack
from wdskit.dataset.index import read_index
from wdskit.shards.indexing import index_folder

PEERS = Path(__file__).parent / "peers"
OLD_WEBDATASET = Path(sys.prefix, "peers", "webdataset-0.2.86")  # put there by `make`; this environment has a newer one

Samples = list[tuple[str, dict[str, str]]]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def run(script: str, *arguments: str, old: bool = False, **environment: str) -> str:
    """Run a script of `tests/peers` with this Python; `old` gives it webdataset 0.2.86."""
    paths = [str(OLD_WEBDATASET)] if old else []
    assert not old or OLD_WEBDATASET.is_dir(), f"webdataset 0.2.86 is not in {OLD_WEBDATASET}: run `make setup`"
    settings = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(PEERS / script), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=settings, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


# What wdskit wrote.


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Three folders of shards, as pack makes them from each kind of source."""
    root = tmp_path_factory.mktemp("peers")
    make_folder(root / "photos", {"cat": 4, "dog": 3})
    pack(root / "photos", root / "images", max_samples=3, shuffle=1)
    lines = [
        {
            "key": f"row{n}",
            "image": f"photos/cat/{n % 4:04d}.jpg",
            "caption": f"grüße {n}",
            "n": n,
            "box": {"x": [n, 0.5]},
        }
        for n in range(7)
    ]
    (root / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pack(root / "m.jsonl", root / "table", max_samples=4)
    rows = [
        {"__key__": f"a/{n}", "png": image_bytes("PNG", number=n), "cls": n, "txt": f"text {n}", "npy": np.full(3, n)}
        for n in range(6)
    ]
    pack(rows, root / "rows", max_samples=4)
    return root


FOLDERS = ["images", "table", "rows"]


def expected(folder: Path) -> Samples:
    """The samples as wdskit reads them, in order."""
    found = []
    for entry in read_index(str(folder)).entries:
        with LocalShard(folder / entry.name) as shard:
            found += [
                (shard.key(number), {name: digest(bytes(data)) for name, data in sorted(shard[number].items())})
                for number in range(len(shard))
            ]
    return found


def shards_in(folder: Path) -> list[str]:
    return [str(folder / entry.name) for entry in read_index(str(folder)).entries]


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("old", [False, True], ids=["webdataset", "webdataset-0.2.86"])
def test_webdataset_reads_it(packed, folder, old):
    found = json.loads(run("read_with_webdataset.py", *shards_in(packed / folder), old=old))
    assert (found["version"] == "0.2.86") == old
    assert [(key, fields) for key, fields in found["samples"]] == expected(packed / folder)


@pytest.mark.parametrize("folder", FOLDERS)
def test_hugging_face_datasets_reads_it(packed, folder, tmp_path):
    settings = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HF_DATASETS_CACHE": str(tmp_path)}
    found = json.loads(run("read_with_datasets.py", *shards_in(packed / folder), **settings))
    assert found["streamed"] == found["loaded"]
    samples = expected(packed / folder)
    assert [row["__key__"] for row in found["streamed"]] == [key for key, _ in samples]
    for row, (_, fields) in zip(found["streamed"], samples, strict=True):
        assert {name for name in row if name != "__key__"} == set(fields)
        for name in {"jpg", "png"} & set(fields):
            assert row[name] == fields[name]
    if folder == "rows":
        assert [(row["cls"], row["txt"], row["npy"]) for row in found["streamed"]] == [
            (n, f"text {n}", [n] * 3) for n in range(6)
        ]
    if folder == "table":
        assert [row["json"]["caption"] for row in found["streamed"]] == [f"grüße {n}" for n in range(7)]
        assert [row["json"]["box"] for row in found["streamed"]] == [{"x": [n, 0.5]} for n in range(7)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_wids_reads_it_by_the_index(packed, folder, tmp_path):
    found = json.loads(run("read_with_wids.py", str(packed / folder / "index.json"), str(tmp_path), old=True))
    names = [(key, fields) for key, fields in found]
    assert names == expected(packed / folder)


@pytest.mark.parametrize("folder", FOLDERS)
def test_gnu_tar_and_python_read_it(packed, folder, tmp_path):
    for path in shards_in(packed / folder):
        target = tmp_path / Path(path).name
        target.mkdir()
        subprocess.run(["tar", "-xf", path, "-C", str(target)], check=True, capture_output=True)
        extracted = {p.relative_to(target).as_posix(): p.read_bytes() for p in target.rglob("*") if p.is_file()}
        with tarfile.open(path, "r:") as archive:
            assert {info.name: archive.extractfile(info).read() for info in archive} == extracted
        with LocalShard(path) as shard:
            ours = {
                f"{shard.key(number)}.{name}": bytes(data)
                for number in range(len(shard))
                for name, data in shard[number].items()
            }
        assert ours == extracted


def test_an_index_of_offsets_is_energons(packed):
    """N + 1 little-endian uint64 and nothing else: where each sample's first header is, and where the members end."""
    for path in shards_in(packed / "images"):
        offsets = np.fromfile(f"{path}.idx", dtype="<u8")
        data = Path(path).read_bytes()
        with tarfile.open(path, "r:") as archive:
            members = list(archive)
        firsts = [info.offset for number, info in enumerate(members) if number % 3 == 0]  # cls, jpg, json
        assert offsets.tolist() == [*firsts, len(data) - 1024]


# What others wrote.

NAMES = {
    "short": "img/%03d",
    "folder of 130 bytes": "d" * 65 + "/" + "e" * 65 + "/%03d",
    "name of 120 bytes": "n" * 110 + "%03d",
    "over 255 bytes": "folder/" * 40 + "%03d",
    "not ascii": "bild-äöü/雪%03d",
}
FORMATS = {"ustar": "ustar", "pax": "posix", "gnu": "gnu"}


def check_read(folder: Path, samples: dict[str, dict[str, bytes]]) -> None:
    """Read a folder of shards in every way that wdskit has."""
    streamed = {
        sample["__key__"]: {name: data for name, data in sample.items() if not name.startswith("__")}
        for sample in Pipeline().stream(str(folder / "*.tar"), shuffle_shards=False).loader(workers=0)
    }
    assert streamed == samples
    report = index_folder(folder)
    assert report.index.num_samples == len(samples)
    numbered = {}
    for entry in report.index.entries:
        with LocalShard(folder / entry.name) as shard:
            numbered |= {
                shard.key(n): {name: bytes(data) for name, data in shard[n].items()} for n in range(len(shard))
            }
    assert numbered == samples
    config = {"version": 1, "pipeline": [{"stream": str(folder)}, {"to_dict": ["__key__", "jpg"]}]}
    assert {sample["__key__"]: sample["jpg"] for sample in make_loader(config, workers=0)} == {
        key: fields["jpg"] for key, fields in samples.items()
    }


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("names", NAMES)
def test_what_gnu_tar_wrote_is_read(tmp_path, format_, names):
    if format_ == "ustar" and names in {"name of 120 bytes", "over 255 bytes"}:
        return  # names that ustar cannot hold
    key = NAMES[names]
    samples = {key % n: {"jpg": image_bytes(number=n), "json": b'{"n":%d}' % n} for n in range(5)}
    (tmp_path / "out").mkdir()
    for name, fields in samples.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        for field, data in fields.items():
            (tmp_path / f"{name}.{field}").write_bytes(data)
    top = key.split("/", 1)[0] if "/" in key else "."
    command = ["tar", f"--format={FORMATS[format_]}", "--sort=name", "--exclude=./out", "-cf", "out/a.tar", top]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "LC_ALL": "C.UTF-8"}, capture_output=True)
    prefix = "./" if top == "." else ""
    check_read(tmp_path / "out", {prefix + name: fields for name, fields in samples.items()})


@pytest.mark.parametrize("format_", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_tarfile_wrote_is_read(tmp_path, format_):
    samples = {f"bild-ä/{n}": {"jpg": image_bytes(number=n), "cls": b"%d" % n} for n in range(4)}
    with tarfile.open(tmp_path / "a.tar", "w", format=format_) as archive:
        for key, fields in samples.items():
            for name, data in fields.items():
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size, info.mtime, info.uname = len(data), 1700000000.25, "jürgen"
                archive.addfile(info, io.BytesIO(data))
    check_read(tmp_path, samples)


@pytest.mark.parametrize("old", [False, True], ids=["webdataset", "webdataset-0.2.86"])
@pytest.mark.parametrize("options", [{}, {"mtime": 0}, {"mtime": 12345.5}], ids=str)
def test_what_webdatasets_shard_writer_wrote_is_read(tmp_path, old, options):
    samples = {f"sample{n:04d}": {"jpg": image_bytes(number=n), "txt": b"text %d" % n} for n in range(7)}
    as_text = [
        [key, {name: data.decode("latin-1") for name, data in fields.items()}] for key, fields in samples.items()
    ]
    (tmp_path / "samples.json").write_text(json.dumps(as_text))
    (tmp_path / "out").mkdir()
    pattern = str(tmp_path / "out" / "a-%06d.tar")
    version = run("write_with_webdataset.py", str(tmp_path / "samples.json"), pattern, json.dumps(options), old=old)
    assert (version == "0.2.86") == old
    assert len(list((tmp_path / "out").glob("*.tar"))) == 3
    check_read(tmp_path / "out", samples)


def test_streams_run_on_webdataset_0_2_86():
    """The stream's own tests, a fair part of them, with the oldest webdataset that is supported."""
    chosen = "with_epoch_yields_n or two_ranks_of_two_workers or data_pipeline or torchs_own_loader or goes_on_where"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    if os.environ.get("WDSKIT_ALL_PEERS"):
        command = command[:-2]
    code = "import webdataset; assert webdataset.__version__ == '0.2.86', webdataset.__version__"
    environment = {**os.environ, "PYTHONPATH": str(OLD_WEBDATASET)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    files = ["tests/test_stream.py"]
    done = subprocess.run(
        [*command, *files], cwd=PEERS.parent.parent, env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
