"""Tars of a store are packed to the same bytes as their local copies, or not at all."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from urllib.parse import quote

import pytest
from disks import WatchedDisk
from images import image_bytes
from object_server import BUCKET, put, read_from, s3_server
from pack_cases import staged
from shards import bytes_in, samples_in, write_shard
from store_proxy import DROP, StoreProxy

from wdskit import FolderIndexError, PackError, RowError, StorageError, pack, reshard, verify
from wdskit.packing import remote_prefetch as ahead
from wdskit.shards.index import index_folder
from wdskit.storage import requests
from wdskit.storage.urls import read_bytes

NAMES = ("part-000000.tar", "part-000001.tar", "part-00~2 é#.tar")


@pytest.fixture(scope="module")
def s3():
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def environment(s3, tmp_path, monkeypatch):
    read_from(s3, monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(requests, "WAIT_S", 0.001)


@pytest.fixture
def proxy(s3, monkeypatch):
    with StoreProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        requests.loop_of_this_process("").stores.clear()
        yield proxy


def samples(start: int, stop: int) -> dict[str, dict[str, bytes]]:
    return {
        f"{'cat' if n % 3 else 'dog'}/{n:03d}": {
            "jpg": image_bytes(number=n % 19),
            "json": b'{"n": %d, "caption": "number %d"}' % (n, n),
            "cls": b"%d" % (n % 3),
        }
        for n in range(start, stop)
    }


def write_others(path: Path) -> None:
    """Write tars like those of other programs: pax, keys with a leading dot, `jpeg`, a foreign and a large member."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in (
            ("./README", b"no sample"),
            ("./x/1.jpeg", image_bytes(number=200)),
            ("./x/1.json", b'{"n": 1, "caption": "one"}'),
            ("./x/2.json", b'{"n": 2, "caption": "two"}'),
            ("./x/2.bin", bytes(range(256)) * (9 << 12)),
            ("./x/3.txt", b""),
            ("./x/3.json", b'{"n": 3, "caption": "three"}'),
        ):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), 1.5
            tar.addfile(member, io.BytesIO(data))


def upload(s3: str, folder: Path, to: str) -> str:
    """Upload the files of a folder to the bucket, and return the folder's URL."""
    for path in folder.iterdir():
        if not path.name.startswith("."):
            put(f"{s3}/{BUCKET}/{to}/{quote(path.name)}", path.read_bytes())
    return f"s3://{BUCKET}/{to}"


@pytest.fixture(scope="module")
def source(tmp_path_factory, s3) -> tuple[Path, str]:
    """A folder of tars without an index, and its URL."""
    folder = tmp_path_factory.mktemp("tars") / "old"
    folder.mkdir()
    write_shard(folder / NAMES[0], samples(0, 30))
    write_shard(folder / NAMES[1], samples(30, 41))
    write_others(folder / NAMES[2])
    return folder, upload(s3, folder, "old")


def packed(source: object, folder: Path, **options) -> dict[str, bytes]:
    """Return the files that `pack` writes, without the lists that name the source."""
    pack(source, folder / "out", **options)
    return {name: data for name, data in bytes_in(folder / "out").items() if not name.endswith(".jsonl")}


WAYS = {
    "as they are": {},
    "shuffled": {"shuffle": 3, "max_samples": 9},
    "workers": {"shuffle": 3, "max_samples": 5, "workers": 2},
    "threads": {"max_samples": 9, "threads": 3},
    "split": {"split": "train=0.7,val=0.3", "max_samples": 10},
    "hashed": {"keys": "hashed", "max_samples": 20},
    "fields": {"fields": {"txt": "caption"}, "skip_bad": True},
    "checked": {"skip_bad": True, "duplicates": "drop", "workers": 2, "max_samples": 9, "require": "jpg"},
    "resized": {"resize": 6, "format": "png", "derive": "width", "max_samples": 10, "threads": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_tars_of_a_bucket_give_the_bytes_that_their_copies_give(tmp_path, source, way):
    folder, url = source
    here = packed(folder, tmp_path / "here", **{**WAYS[way], "workers": 1, "threads": 1})
    assert packed(url, tmp_path / "there", **WAYS[way]) == here
    assert len(here) > 3
    assert verify(str(tmp_path / "there" / "out")).is_clean


PLACES = {
    "{url}": NAMES,
    "{url}/": NAMES,
    "{url}/*.tar": NAMES,
    "{url}/part-*": NAMES,
    "{url}/part-00000[01].tar": NAMES[:2],
    "{url}/part-{000000..000001}.tar": NAMES[:2],
    "{web}/part-{000001,000000}.tar": (NAMES[1], NAMES[0]),
    "{url}/part-00~2%20%C3%A9%23.tar": NAMES[2:],
    "{here}/part-000000.tar::{url}/part-000001.tar": NAMES[:2],
    "{url}/part-000000.tar::{here}/part-000001.tar": NAMES[:2],
}


@pytest.mark.parametrize("pattern", PLACES)
def test_tars_are_named_one_by_one_by_a_pattern_or_by_their_folder(tmp_path, s3, source, pattern):
    folder, url = source
    names = {"{url}": url, "{web}": f"{s3}/{BUCKET}/old", "{here}": str(folder)}
    given = pattern
    for name, value in names.items():
        given = given.replace(name, value)
    here = "::".join(str(folder / name) for name in PLACES[pattern])
    assert packed(given, tmp_path / "there") == packed(here, tmp_path / "here")


def test_the_index_of_their_folder_counts_and_so_do_its_classes(tmp_path, s3):
    folder = tmp_path / "indexed"
    pack([{"__key__": f"k{n}", "cls": n % 2, "txt": "x" * n} for n in range(20)], folder, max_samples=6)
    (folder / "classes.json").write_text('["cat", "dog"]')
    url = upload(s3, folder, "indexed")
    there = packed(f"{url}/*.tar", tmp_path / "there", max_samples=7)
    assert there == packed(folder, tmp_path / "here", max_samples=7)
    assert "classes.json" in there
    data = bytearray((folder / "indexed-000001.tar").read_bytes())
    data[600] ^= 1  # a byte of a payload, which no header covers
    put(f"{s3}/{BUCKET}/indexed/indexed-000001.tar", bytes(data))
    with pytest.raises(FolderIndexError, match=rf"{url}/indexed-000001.tar: its sha256 is not the one"):
        pack(url, tmp_path / "out")
    put(f"{s3}/{BUCKET}/indexed/more.tar", b"")
    with pytest.raises(FolderIndexError, match=r"more.tar: the folder's index does not list this shard"):
        pack(f"{url}/{{indexed-000000,more}}.tar", tmp_path / "out")
    assert not [*tmp_path.glob("out/*.tar")]


def test_from_a_bucket_to_a_bucket(tmp_path, source):
    folder, url = source
    dest = f"s3://{BUCKET}/{tmp_path.name}/out"
    pack(url, dest, max_samples=9, shuffle=1)
    here = packed(folder, tmp_path / "here", max_samples=9, shuffle=1)
    assert {name: read_bytes(f"{dest}/{name}", limit=1 << 30) for name in here} == here


# Faults.


CHILD = """
import json, os, signal, sys
from wdskit import pack

def kill(now):
    if [now.stage, now.num_samples] == json.loads(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

pack(sys.argv[1], sys.argv[2], progress=kill, **json.loads(sys.argv[4]))
"""


@pytest.mark.parametrize("point", [("reading", 0), ("packing", 0), ("packing", 1), ("packing", 13), ("packing", 43)])
@pytest.mark.parametrize("options", [{"max_samples": 6}, {"max_samples": 6, "shuffle": 2}])
def test_a_killed_run_is_continued_by_the_same_call(tmp_path, source, point, options):
    folder, url = source
    out = tmp_path / "there" / "out"
    child = [sys.executable, "-c", CHILD, url, str(out), json.dumps(point), json.dumps(options)]
    assert subprocess.run(child, check=False).returncode == -signal.SIGKILL
    assert not (out / "index.json").exists()
    filled = {path.name for path in staged(out).glob("*.tar")} if point[0] == "packing" else set()
    assert len(filled) == (point[1] // 6 if point[0] == "packing" else 0)
    disk = WatchedDisk()
    written: set[str] = set()
    disk.before = lambda name, *args: written.add(args[0].name) if name == "open" else None
    assert packed(url, tmp_path / "there", disk=disk, **options) == packed(folder, tmp_path / "here", **options)
    assert not any(name in one for name in filled for one in written if ".idx" not in one)
    assert pack(url, out, **options).was_done


def test_an_object_that_is_replaced_in_the_meantime_is_an_error(tmp_path, s3, monkeypatch):
    """This includes an object of the same size. Shards filled from the old object are not used for the new one."""
    monkeypatch.setattr(ahead, "BATCH_ROWS", 4)
    old, new = (write_shard(tmp_path / name, samples(*span)) for name, span in (("a", (0, 30)), ("b", (30, 60))))
    assert old.stat().st_size == new.stat().st_size
    at = f"{s3}/{BUCKET}/{tmp_path.name}/t.tar"
    url = f"s3://{BUCKET}/{tmp_path.name}/t.tar"
    for when in (("packing", 0), ("packing", 11)):
        put(at, old.read_bytes())

        def replace(now, when=when):
            if (now.stage, now.num_samples) == when:
                put(at, new.read_bytes())

        with pytest.raises(StorageError, match=rf"{url}: the object was replaced while it was read"):
            pack(url, tmp_path / "out", max_samples=10, progress=replace)
        assert not (tmp_path / "out" / "index.json").exists()
    with pytest.raises(PackError, match="a different run was stopped here; 1 of its shards"):
        pack(url, tmp_path / "out", max_samples=10)
    pack(url, tmp_path / "out", max_samples=10, restart=True)
    assert samples_in(tmp_path / "out") == samples(30, 60)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda data: data[:-1024], "stops before its end marker"),
        (lambda data: data[:30_000], "stops inside"),
        (lambda data: data[:700], "stops inside"),
        (lambda _: b"", "end marker"),
        (lambda data: data + b"x" * 512, "behind the end marker|after the end marker|end marker"),
        (lambda data: b"\x1f\x8b" + data[2:], "this is a gzip file, not a tar"),
        (lambda data: data[:100] + b"x" + data[101:], "checksum"),
    ],
)
def test_a_cut_or_damaged_object_is_an_error_that_names_it(tmp_path, s3, source, damage, error):
    folder, _ = source
    url = f"s3://{BUCKET}/{tmp_path.name}"
    put(f"{s3}/{BUCKET}/{tmp_path.name}/a.tar", (folder / NAMES[1]).read_bytes())
    put(f"{s3}/{BUCKET}/{tmp_path.name}/b.tar", damage((folder / NAMES[0]).read_bytes()))
    with pytest.raises(RowError, match=error) as caught:
        pack(url, tmp_path / "out")
    assert str(caught.value).startswith(f"{url}/b.tar, byte ")
    assert not [*tmp_path.glob("out/**/*.tar")]
    result = pack(url, tmp_path / "out", skip_bad=True)
    assert [str(err.problem) for err in result.rejected] == [caught.value.problem]
    right, found = samples(0, 60), samples_in(tmp_path / "out")
    assert found == {key: right[key] for key in found}
    assert found.keys() >= samples(30, 41).keys()


def test_a_bad_sample_is_named_by_the_url_of_its_tar(tmp_path, s3):
    write_shard(tmp_path / "t.tar", {"a": {"jpg": image_bytes()}, "b": {"jpg": image_bytes()[:-40]}})
    put(f"{s3}/{BUCKET}/{tmp_path.name}/t.tar", (tmp_path / "t.tar").read_bytes())
    url = f"s3://{BUCKET}/{tmp_path.name}/t.tar"
    with pytest.raises(RowError, match=rf"^{url}: b: ") as caught:
        pack(url, tmp_path / "out")
    result = pack(url, tmp_path / "out", skip_bad=True)
    assert [str(err.problem) for err in result.rejected] == [caught.value.problem]
    assert result.num_samples == 1


@pytest.mark.parametrize("fault", [503, DROP])
def test_a_store_that_fails_for_now_is_asked_again(tmp_path, source, proxy, fault):
    """Each request fails once. Neighbouring samples share a request: there are far fewer requests than fields."""
    folder, url = source
    failed: set[str] = set()

    def fail(method: str, path: str) -> int | None:
        if path in failed:
            return None
        failed.add(path)
        return fault

    proxy.fail = fail
    assert packed(url, tmp_path / "there", shuffle=1) == packed(folder, tmp_path / "here", shuffle=1)
    assert len(failed) >= 5
    assert len([path for _, path in proxy.requests if ".tar" in path]) < 30


SECRET = "X-Amz-Signature=0123"


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (
            "s3://shards/labels.csv",
            {},
            "s3://shards/labels.csv: only tars are packed from a store: by name, by pattern",
        ),
        ("s3://shards/a.tar.gz", {}, "only tars are packed from a store"),
        ("https://host/photos", {}, "https://host/photos: only tars are packed from a store"),
        ("https://host/x.parquet", {}, "only tars are packed from a store"),
        ("s3://shards/old", {"from_": "parquet"}, "s3://shards/old: from: only tars are packed from a store"),
        ("s3://shards/photos", {}, "s3://shards/photos: no tar in this folder matches.\n  Only tars are read"),
        ("s3://shards/old/x-*.tar", {}, r"x-\*.tar: no tar in this folder matches"),
        ("s3://shards/old/gone.tar", {}, "s3://shards/old/gone.tar: there is no such object"),
        ("s3://no-such-bucket/a.tar", {}, "there is no such bucket"),
        ("{s3}/shards/old/", {}, "old: only folders of s3://, gs://, az:// can be listed. Name each file"),
        ("{s3}/shards/old/part-000000.tar?" + SECRET, {}, "part-000000.tar: the query of a URL may be a secret"),
        ("{s3}/shards/old/{a,b}.tar?" + SECRET, {"from_": "tar"}, "the query of a URL may be a secret"),
        ("a.tar::{s3}/b.tar?" + SECRET, {"sidecars": ["json"]}, "the query of a URL may be a secret"),
        ("http://me:0123@host/a.tar", {}, "http://host/a.tar: a user or password in a URL is not supported"),
        ("s3://shards/a.tar?0123", {}, r"s3://shards/a.tar: `\?` and `#` end the key"),
        ("sftp://host/a.tar", {}, "the scheme `sftp:` is not supported"),
        ("s3://shards/old", {"sidecars": ["json"]}, "sidecars is for an image folder, but this is tars"),
    ],
)
def test_what_cannot_be_packed_says_what_can(tmp_path, s3, source, given, options, message):
    """No message shows a URL's query, which may be a signature."""
    with pytest.raises((PackError, StorageError, FolderIndexError), match=message) as caught:
        pack(given.replace("{s3}", s3), tmp_path / "out", **options)
    assert "0123" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_no_shard_is_written_among_its_sources(source):
    _, url = source
    with pytest.raises(PackError, match=r"\.tar: this shard is in no index"):
        pack(f"{url}/part-000001.tar", url)


def test_an_indexed_copy_of_the_folder_is_found_by_its_pattern(tmp_path, s3, source):
    """Its index, made in the bucket, names the same shards that a listing finds."""
    folder, _ = source
    url = upload(s3, folder, f"{tmp_path.name}/old")
    before = packed(f"{url}/*.tar", tmp_path / "before")
    index_folder(url, workers=1)
    assert packed(f"{url}/*.tar", tmp_path / "after") == before


def test_reshard_shows_no_query_either(tmp_path, s3):
    for given in (f"{s3}/shards/a.tar?{SECRET}", [f"{s3}/shards/{{a,b}}.tar?{SECRET}"]):
        with pytest.raises(PackError, match="the query of a URL may be a secret") as caught:
            reshard(given, tmp_path / "out")
        assert "0123" not in str(caught.value)
