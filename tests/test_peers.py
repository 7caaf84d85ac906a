"""Other programs read what wdskit writes, and wdskit what they write, with equal content.

The tests of webdataset are in `peers/test_webdataset.py`, which runs here with the oldest supported webdataset.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from folders import ALL, TESTS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from images import image_bytes
from packed import KINDS, Packed, Samples, pack_all
from reading import check_read

OLD_WEBDATASET = Path(sys.prefix, "peers", "webdataset-0.2.86")  # installed by `make`; this environment has a newer one

GNU_TAR = shutil.which("gtar") or "tar"
TAR_PROGRAMS = [GNU_TAR, *filter(shutil.which, ["bsdtar", "busybox"])]

UTF_8 = {**os.environ, "LC_ALL": "C.UTF-8"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> dict[str, Packed]:
    return pack_all(tmp_path_factory.mktemp("packed"))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tar(*words: str | Path, cwd: Path, program: str = GNU_TAR, data: bytes = b"") -> bytes:
    """Run a tar program, check that it reports no problem, and return what it prints."""
    command = [program, *(["tar"] if program == "busybox" else []), *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=UTF_8, input=data, check=False, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    return done.stdout


def python(*words: str, **environment: str) -> str:
    """Run this Python in the repository, and return the last line that it prints."""
    options = {"cwd": TESTS.parent, "env": {**os.environ, **environment}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *words], check=False, timeout=900, **options)
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-6000:]}"
    return done.stdout.splitlines()[-1]


def with_old_webdataset() -> dict[str, str]:
    """Return an environment in which Python finds the oldest supported webdataset before the installed one."""
    command = f"{sys.executable} -m pip install --no-deps --target {OLD_WEBDATASET} webdataset==0.2.86"
    assert OLD_WEBDATASET.is_dir(), f"webdataset 0.2.86 is not there. Run `make setup`, or\n  {command}"
    return {"PYTHONPATH": str(OLD_WEBDATASET)}


# Files that wdskit wrote.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", TAR_PROGRAMS)
def test_tar_programs_list_and_extract_it(packed, kind, program, tmp_path):
    folder, shards, samples = packed[kind]
    wanted = {f"{key}.{name}": data for key, fields in samples.items() for name, data in fields.items()}
    literally = ["--quoting-style=literal"] if program == GNU_TAR else []
    listed = b"".join(tar("-tf", path, *literally, cwd=folder, program=program) for path in shards)
    assert listed.decode().splitlines() == list(wanted)
    for path in shards:
        tar("-xf", path, cwd=tmp_path, program=program)
    found = {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_tarfile_reads_it_and_finds_plain_members_only(packed, kind):
    wanted = [(f"{key}.{name}", data) for key, fields in packed[kind].samples.items() for name, data in fields.items()]
    found = []
    for path in packed[kind].shards:
        with tarfile.open(path, "r:") as archive:
            members = archive.getmembers()
            found += [(info.name, archive.extractfile(info).read()) for info in members]
        assert {(info.type, info.mode, info.uid, info.gid, info.uname, info.gname) for info in members} == {
            (tarfile.REGTYPE, 0o644, 0, 0, "", "")
        }
        assert all(info.mtime == 0 and not info.pax_headers for info in members)
        assert [info.offset_data - info.offset for info in members] == [512] * len(members)
    assert found == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_energons(packed, kind):
    """An `.idx` has N + 1 little-endian uint64. Bytes between two of them are a sample, which any tar reader reads."""
    found = [sample for path in packed[kind].shards for sample in by_offsets(path)]
    assert found == list(packed[kind].samples.items())


def by_offsets(path: str | Path) -> list[tuple[str, dict[str, bytes]]]:
    """Read the samples of a shard by its `.idx`, with code that follows only the description of the format."""
    offsets = [int.from_bytes(word, "little") for word in np.fromfile(f"{path}.idx", dtype="V8").tolist()]
    data = Path(path).read_bytes()
    assert not any(data[offsets[-1] :])
    samples = []
    for start, stop in itertools.pairwise(offsets):
        with tarfile.open(fileobj=io.BytesIO(data[start:stop] + bytes(1024)), mode="r:") as archive:
            members = {info.name: archive.extractfile(info).read() for info in archive if info.isfile()}
        (key,) = {str(Path(name).parent / Path(name).name.split(".")[0]) for name in members}
        samples.append((key, {name[len(key) + 1 :]: content for name, content in members.items()}))
    return samples


def test_wids_reads_it_by_the_index(packed, tmp_path):
    """`names` is left out: wids garbles names that are not ASCII."""
    kinds = [kind for kind in KINDS if kind != "names"]
    found = json.loads(
        python(
            *("-W", "ignore", str(TESTS / "peers" / "read_with_wids.py"), str(tmp_path)),
            *(str(packed[kind].folder / "index.json") for kind in kinds),
            **with_old_webdataset(),
        )
    )
    for kind, read in zip(kinds, found, strict=True):
        wanted = packed[kind].samples.items()
        assert read == [[key, {name: sha256(data) for name, data in fields.items()}] for key, fields in wanted]


def test_hugging_face_datasets_reads_it_streamed_and_loaded(packed, tmp_path):
    """`mixed` and `names` are left out: `datasets` takes the columns from the first samples and ignores later ones."""
    kinds = ["images", "table", "rows"]
    script = [str(TESTS / "peers" / "read_with_datasets.py"), json.dumps([packed[kind].shards for kind in kinds])]
    folders = {"HF_HOME": str(tmp_path), "HF_DATASETS_CACHE": str(tmp_path)}
    found = json.loads(python("-W", "ignore", *script, HF_HUB_OFFLINE="1", **folders))
    for kind, read in zip(kinds, found, strict=True):
        assert read["streamed"] == as_datasets_has_them(packed[kind].samples)
        assert read["loaded"] == read["streamed"]


def as_datasets_has_them(samples: Samples) -> list[dict[str, object]]:
    """Return fields as values by the conventions of `datasets`; None for a missing field."""
    columns = [*next(iter(samples.values())), "__key__"]
    decoders = {
        "json": json.loads,
        "cls": int,
        "txt": bytes.decode,
        "npy": lambda data: np.load(io.BytesIO(data)).tolist(),
        "jpg": sha256,
        "png": sha256,
    }
    rows = [{name: decoders[name](data) for name, data in fields.items()} for fields in samples.values()]
    full = [{**dict.fromkeys(columns), **row, "__key__": key} for key, row in zip(samples, rows, strict=True)]
    assert all(list(row) == columns for row in full)
    return full


# Files that other programs wrote.

LEAVES = {  # `.json`, the longest field, comes after them
    "short": "%03d",
    "folder": "img/%03d",
    "name of 100 bytes": "n" * 92 + "%03d",
    "name of 101 bytes": "n" * 93 + "%03d",
    "path of 101 bytes": "d" * 90 + "/dd%03d",
    "path of 256 bytes": ("e" * 77 + "/") * 2 + "f" * 92 + "%03d",
    "path of 257 bytes": ("e" * 77 + "/") * 2 + "f" * 93 + "%03d",
    "path of 500 bytes": ("g" * 81 + "/") * 6 + "%03d",
    "not ASCII": "bild-äöü/雪%03d",
    "not ASCII, over 255 bytes": ("雪" * 50 + "/") * 2 + "\U0001f600%03d",
    "signs": "a 'b' \"c\" -%03d",
}
TOO_LONG_FOR = {  # ustar has 155 bytes before a slash and 100 after it; v7 has 100 in total
    "ustar": {"name of 101 bytes", "path of 257 bytes", "path of 500 bytes", "not ASCII, over 255 bytes"},
    "v7": {*LEAVES} - {"short", "folder", "name of 100 bytes", "not ASCII", "signs"},
}
FORMATS = ["ustar", "pax", "gnu", "oldgnu", "v7"]


def tree(folder: Path, pattern: str, *, num_samples: int = 4) -> Samples:
    """Write files below `folder`, three per sample, one of them empty; return their contents."""
    samples = {}
    for number in range(num_samples):
        fields = {"jpg": image_bytes(number=number), "json": b'{"n":%d}' % number, "txt": b"x" * (512 * number)}
        for name, data in fields.items():
            path = folder / f"{pattern % number}.{name}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        samples[pattern % number] = fields
    return samples


@pytest.mark.parametrize(
    ("format_", "leaf"),
    [(format_, leaf) for format_ in FORMATS for leaf in LEAVES if leaf not in TOO_LONG_FOR.get(format_, ())],
)
def test_what_gnu_tar_wrote_is_read(tmp_path, format_, leaf):
    """The archive includes members for folders, as `tar FOLDER` writes them."""
    samples = tree(tmp_path / "tree", LEAVES[leaf])
    (tmp_path / "out").mkdir()
    tops = sorted(path.name for path in (tmp_path / "tree").iterdir())
    tar(f"--format={format_}", "--sort=name", "-cf", "../out/a.tar", *tops, cwd=tmp_path / "tree")
    check_read(tmp_path / "out", samples)
    assert by_offsets(tmp_path / "out" / "a.tar") == list(samples.items())


@pytest.mark.parametrize("program", TAR_PROGRAMS)
@pytest.mark.parametrize("leaf", LEAVES)
def test_what_any_tar_program_writes_by_default_is_read(tmp_path, program, leaf):
    samples = tree(tmp_path / "tree", LEAVES[leaf])
    (tmp_path / "out").mkdir()
    files = [f"./{key}.{name}" for key, fields in samples.items() for name in fields]
    tar("-cf", "../out/a.tar", *files, cwd=tmp_path / "tree", program=program)
    check_read(tmp_path / "out", samples)


NAME = st.text(st.characters(codec="utf-8", exclude_characters="/.\0"), min_size=1, max_size=49)  # under 200 bytes
TREES = st.dictionaries(
    st.lists(NAME.filter(lambda name: name[:2] + name[-2:] != "____"), min_size=1, max_size=4).map("/".join),
    st.dictionaries(st.sampled_from(["jpg", "json", "a.b", "x"]), st.binary(max_size=1500), min_size=1),
    min_size=1,
    max_size=5,
)


@settings(max_examples=300 if ALL else 20, suppress_health_check=[HealthCheck.too_slow])
@given(TREES, st.sampled_from(FORMATS[1:4]))
def test_any_names_survive_gnu_tar(tmp_path_factory, samples, format_):
    """Any text in any folder name but `__x__`, which has no samples, passes through GNU tar and each way of reading."""
    folder = tmp_path_factory.mktemp("any")
    written = {}
    for key, fields in samples.items():
        for name, data in sorted(fields.items()):
            path = folder / "tree" / f"{key}.{name}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            written.setdefault(key, {})[name] = data
    (folder / "out").mkdir()
    names = "".join(f"./{key}.{name}\0" for key, fields in written.items() for name in fields)
    options = ["--null", "--verbatim-files-from", "--files-from=-"]
    tar(f"--format={format_}", "-cf", "../out/a.tar", *options, cwd=folder / "tree", data=names.encode())
    check_read(folder / "out", written)


# webdataset.


def test_all_this_holds_with_webdataset_0_2_86():
    """Run the tests of `peers/test_webdataset.py` and of the stages with the oldest supported webdataset. `make long`
    also runs all tests of streams, which take most of the time.
    """
    files = [
        "tests/peers/test_webdataset.py",
        "tests/stages/test_collate.py",
        *(["tests/stages/test_streaming.py"] if ALL else []),
    ]
    left_out = ["newest_version", *([] if ALL else ["start_method", "python_exits"])]
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", " and ".join(f"not {name}" for name in left_out)]
    script = f"""
import sys
import pytest
import webdataset
assert webdataset.__version__ == "0.2.86", webdataset.__version__
sys.exit(pytest.main({[*words, *files]}))
"""
    assert " passed" in python("-c", script, **with_old_webdataset())
