"""Packing into a bucket: the objects equal the files of a local run, and an index never names missing objects."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
from object_server import BUCKET, put, read_from, s3_server
from shards import bytes_in, write_pictures
from store_proxy import DROP, StoreProxy

import wdskit
from wdskit import PackError, Pipeline, StorageError, make_loader, pack, reshard, select, verify
from wdskit.errors import FolderIndexError
from wdskit.packing import api
from wdskit.packing.upload import Upload as Uploading
from wdskit.shards.index import index_folder
from wdskit.storage import buckets, requests
from wdskit.storage.buckets import list_objects
from wdskit.storage.urls import read_bytes


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


@pytest.fixture
def url(tmp_path) -> str:
    """The URL of a folder of this test, with the name of its local copy."""
    return f"s3://{BUCKET}/{tmp_path.name}/out"


def rows(num: int = 12) -> list[dict[str, object]]:
    return [{"__key__": f"k{number:03d}", "txt": f"text {number} " * 50, "cls": number % 3} for number in range(num)]


def bytes_at(url: str) -> dict[str, bytes]:
    """Return the objects of a folder in a bucket, as `bytes_in` does for files."""
    found = list_objects(url)
    names = {unquote(one.url.removeprefix(f"{url}/")): one.url for one in found}
    return {name: read_bytes(at, limit=1 << 30) for name, at in names.items() if name != ".wdskit.last-run"}


def pack_here(tmp_path: Path, source: object = None, **options) -> dict[str, bytes]:
    pack(rows() if source is None else source, tmp_path / "here" / "out", **options)
    return bytes_in(tmp_path / "here" / "out")


WAYS = {
    "rows": {"max_samples": 5},
    "shuffled": {"max_samples": 5, "shuffle": 3, "workers": 2},
    "split": {"split": "train=0.7,val=0.3", "max_samples": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_bucket_gets_the_bytes_of_a_local_run(tmp_path, url, way):
    result = pack(rows(), url, **WAYS[way])
    assert bytes_at(url) == pack_here(tmp_path, **WAYS[way])
    assert result.folder == url
    assert verify(url).is_clean
    left = [path for path in (tmp_path / "cache").rglob("*") if path.suffix in (".tar", ".idx", ".log")]
    assert not left


def test_rows_that_come_once_are_uploaded_while_they_come(tmp_path, url, monkeypatch):
    """At most a few shards are on the local disk at a time."""
    most = 0

    def counted():
        nonlocal most
        for row in rows(60):
            most = max(most, len([*(tmp_path / "cache").rglob("*.tar")]))
            yield row

    pack(counted(), url, max_samples=2)
    assert bytes_at(url) == pack_here(tmp_path, iter(rows(60)), max_samples=2)
    assert 0 < most <= 4


def test_an_image_folder_is_packed_and_trained_from(tmp_path, url):
    """The classes are uploaded too; batches and state are those of the local folder."""
    write_pictures(tmp_path / "pictures", [9, 0, 12])
    index_folder(tmp_path / "pictures", workers=1)
    reshard(str(tmp_path / "pictures"), url, max_samples=5, shuffle=7, staging=tmp_path / "room")
    reshard(str(tmp_path / "pictures"), tmp_path / "here" / "out", max_samples=5, shuffle=7)
    assert bytes_at(url) == bytes_in(tmp_path / "here" / "out")
    assert not (tmp_path / "cache" / "wdskit" / "uploads").exists()

    def values(at: str) -> list[str]:
        pipe = Pipeline().exact(f"{at}/*.tar", seed=3).to_tuple("cls", "txt", "__key__").batched(4)
        return [repr(batch) for batch in make_loader(pipe, workers=0)]

    assert values(url) == values(str(tmp_path / "here" / "out"))


def test_the_same_again_does_nothing_and_other_options_are_refused(s3, url):
    pack(rows(), url, max_samples=5)
    before = {one.url: one.etag for one in list_objects(url)}
    assert pack(rows(), url, max_samples=5).was_done
    for source, options in ((rows(), {"max_samples": 6}), (rows()[1:], {"max_samples": 5})):
        with pytest.raises(PackError, match=rf"{url}: this folder is packed(.*\n)*  Write to another folder\.$"):
            pack(source, url, **options)
    assert {one.url: one.etag for one in list_objects(url)} == before
    at, shard = f"{s3}/{url.removeprefix('s3://')}/out-000001.tar", bytes_at(url)["out-000001.tar"]
    put(at, bytes(len(shard)))
    with pytest.raises(PackError, match=r"out-000001.tar or its .idx is gone, or was replaced"):
        pack(rows(), url, max_samples=5)
    put(at, shard)
    assert pack(rows(), url, max_samples=5).was_done
    for name in ("out-000002.tar.idx", "out-000001.tar"):
        buckets.delete_object(f"{url}/{name}")
        with pytest.raises(PackError, match=rf"{name.removesuffix('.idx')} or its .idx is gone"):
            pack(rows(), url, max_samples=5)


@pytest.mark.parametrize("place", ["a file", "a file/below", "/proc/nowhere"])
def test_a_staging_folder_that_cannot_be_made_is_named(url, tmp_path, place):
    (tmp_path / "a file").touch()
    with pytest.raises(PackError, match=r"shards are filled here .* be written: .*[^.]\.\n  Choose another"):
        pack(rows(), url, staging=tmp_path / place)
    assert bytes_at(url) == {}


def test_a_folder_of_a_bucket_may_have_a_dot(url):
    """Also in its last part, as in v1.0."""
    pack(rows(), f"{url}/v1.0", max_samples=5)
    pipe = Pipeline().sequential(f"{url}/v1.0").to_tuple("__key__").batched(1)
    assert len(list(pipe.loader(workers=0))) == len(rows())
    assert wdskit.verify(f"{url}/v1.0").is_clean
    assert wdskit.info(f"{url}/v1.0").num_samples == len(rows())
    pack(f"{url}/v1.0", f"{url}/v2.0")
    assert wdskit.info(f"{url}/v2.0/").num_samples == len(rows())


@pytest.mark.parametrize("name", ["out-000001.tar", "stray.tar", "out-000000.tar.idx", "classes.json"])
def test_what_another_has_written_is_never_replaced(s3, url, name, tmp_path):
    source = tmp_path / "source"
    for label in ("a", "b"):
        (source / label).mkdir(parents=True)
        (source / label / "x.txt").write_text(label)
    put(f"{s3}/{url.removeprefix('s3://')}/{name}", b"precious")
    with pytest.raises(PackError, match=name):
        pack(source, url, files=["txt"], max_samples=1)
    assert bytes_at(url) == {name: b"precious"}


CHILD = """
import json, os, signal, sys
from wdskit.storage import buckets
from wdskit import pack
at, place = int(sys.argv[2]), sys.argv[3]
upload, num = buckets._upload, 0

async def killed(location, path, num_bytes):
    global num
    number, num = num, num + 1
    if number == at and place == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    etag = await upload(location, path, num_bytes)
    if number == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return etag

buckets._upload = killed
pack(json.loads(sys.argv[4]), sys.argv[1], max_samples=5)
"""


POINTS = [(0, "before"), (1, "after"), (3, "after"), (6, "before"), (7, "after"), (8, "before"), (8, "after")]


@pytest.mark.parametrize(("at", "place"), POINTS)
def test_a_killed_run_goes_on_and_uploads_nothing_twice(tmp_path, url, monkeypatch, at, place):
    child = subprocess.run([sys.executable, "-c", CHILD, url, str(at), place, json.dumps(rows())], check=False)
    assert child.returncode == -signal.SIGKILL
    there = {unquote(one.url.rpartition("/")[2]): one.etag for one in list_objects(url)}
    assert "index.json" not in there or verify(url).is_clean
    lines = [line for log in (tmp_path / "cache").rglob("*.log") for line in log.read_text().splitlines() if line]
    uploaded = {noted[0] for noted in map(json.loads, lines) if isinstance(noted, list)}
    sent: list[str] = []
    upload = buckets._upload

    async def counted(location, path, num_bytes):
        sent.append(path.name)
        return await upload(location, path, num_bytes)

    monkeypatch.setattr(buckets, "_upload", counted)
    pack(rows(), url, max_samples=5)
    assert bytes_at(url) == pack_here(tmp_path, max_samples=5)
    assert verify(url).is_clean
    assert not uploaded & {*sent}
    assert at < 6 or len(uploaded) == 3
    assert not sent or sent[-1] == "index.json"


def test_another_run_where_one_was_stopped(tmp_path, url, monkeypatch):
    """Another run is refused; with `restart`, the objects of the stopped run are removed."""
    upload, num = buckets._upload, 0

    async def failing(location, path, num_bytes):
        nonlocal num
        num += 1
        if path.name == "out-000002.tar":
            raise StorageError("the line is cut")
        return await upload(location, path, num_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(buckets, "_upload", failing)
        with pytest.raises(StorageError, match="the line is cut"):
            pack(rows(), url, max_samples=4)
    assert {"out-000000.tar", "out-000001.tar"} <= bytes_at(url).keys()
    with pytest.raises(PackError, match=rf"{url}: a different run was stopped here; 2 of its shards"):
        pack(rows(), url, max_samples=12)
    pack(rows(), url, max_samples=12, restart=True)
    assert bytes_at(url) == pack_here(tmp_path, max_samples=12)


@pytest.mark.parametrize(
    ("name", "has_own_size"), [("out-000000.tar", True), ("out-000001.tar.idx", False), ("out-000002.tar", True)]
)
def test_a_stopped_run_takes_no_object_of_another_writer_for_its_own(s3, url, monkeypatch, name, has_own_size):
    """Shard 2 was uploaded, but the run stopped before it stored the ETag. Without foreign objects all are deleted."""
    note = Uploading.finished

    def stopped(upload, most, disk):
        for one in note(upload, most, disk):
            if one.entry.name == "out-000002.tar":
                raise StorageError("the line is cut")
            yield one

    with monkeypatch.context() as patch:
        patch.setattr(Uploading, "finished", stopped)
        with pytest.raises(StorageError, match="the line is cut"):
            pack(rows(), url, max_samples=4)
    before = bytes_at(url)
    assert len(before) == 6
    precious = bytes(len(before[name])) if has_own_size else b"precious"
    put(f"{s3}/{url.removeprefix('s3://')}/{name}", precious)
    with pytest.raises(PackError, match=rf"{url}/{name}: this file exists already and is in the way"):
        pack(rows(), url, max_samples=4)
    with pytest.raises(
        PackError, match=rf"{url}/{name}: (another writer put this object here|.*is in no index|.*in the way)"
    ):
        pack(rows(), url, max_samples=12, restart=True)
    assert bytes_at(url) == {**before, name: precious}
    buckets.delete_object(f"{url}/{name}")
    pack(rows(), url, max_samples=12, restart=True)
    assert verify(url).is_clean
    assert {one for one in bytes_at(url) if ".tar" in one} == {"out-000000.tar", "out-000000.tar.idx"}


def test_a_shard_that_is_gone_in_the_meantime_is_uploaded_again(tmp_path, url, monkeypatch):
    """An index that names the missing shard is never visible."""
    upload = buckets._upload

    async def losing(location, path, num_bytes):
        if path.name == "out-000002.tar":
            first = location.key.replace("2.tar", "0.tar")
            while True:
                with contextlib.suppress(StorageError):  # it is being uploaded
                    await requests.call_with_retries(location, lambda store: store.head_async(first), 60)
                    await requests.call_with_retries(location, lambda store: store.delete_async(first), 60)
                    break
                await asyncio.sleep(0.01)
        return await upload(location, path, num_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(buckets, "_upload", losing)
        with pytest.raises(PackError, match=rf"{url}/out-000000.tar: it is gone"):
            pack(rows(), url, max_samples=4)
    assert "index.json" not in bytes_at(url)
    pack(rows(), url, max_samples=4)
    assert bytes_at(url) == pack_here(tmp_path, max_samples=4)


@pytest.mark.parametrize("fault", [503, DROP])
def test_a_store_that_fails_for_now_is_tried_again(tmp_path, url, proxy, fault):
    """This holds for small objects and for parts of large ones; a lost part is not in the shard."""
    source = [{"__key__": str(number), "bin": os.urandom(9 << 20)} for number in range(5)]
    failed: set[str] = set()

    def fail(method: str, path: str) -> int | None:
        if method not in ("PUT", "POST") or path.partition("?")[0] + method in failed:
            return None
        failed.add(path.partition("?")[0] + method)
        return fault

    proxy.fail = fail
    pack(source, url, max_samples=4)
    assert len(failed) >= 8
    assert any("partNumber=2" in path for _, path in proxy.requests)
    assert bytes_at(url) == pack_here(tmp_path, source, max_samples=4)


def test_a_store_that_fails_for_good(url, proxy, monkeypatch):
    monkeypatch.setattr(requests, "RETRIES", 2)
    monkeypatch.setattr(requests, "RETRY_S", 0.5)
    for status, message in ((503, "answered 503"), (403, "and their permissions")):
        proxy.fail = lambda method, _, status=status: status if method == "PUT" else None
        with pytest.raises(StorageError, match=message):
            pack(rows(), url, max_samples=5)
        assert bytes_at(url) == {}
    proxy.fail = lambda *_: 403
    with pytest.raises(StorageError, match="AccessDenied"):
        pack(rows(), url, max_samples=5)
    proxy.fail = lambda *_: None
    pack(rows(), url, max_samples=5)
    assert verify(url).is_clean


@pytest.mark.parametrize(
    ("dest", "options", "message"),
    [
        ("s3://no-such-bucket/out", {}, "there is no such bucket"),
        (f"s3://{BUCKET}", {}, "the URL does not name a folder of a bucket"),
        ("http://127.0.0.1:9/out", {}, "only buckets of s3://, gs://, az:// can be written to"),
        ("hf://datasets/o/n/out", {}, "only buckets"),
        ("pipe:cat", {}, "never does"),
        (f"s3://{BUCKET}/x", {"append": True}, "append is for local folders"),
        (f"s3://{BUCKET}/x", {"overwrite": True}, "overwrite is for local folders"),
        (f"s3://{BUCKET}/x", {"part": "0/2"}, "part is for local folders"),
        (f"s3://{BUCKET}/x", {"on": "ray"}, "on is for local folders"),
        ("out", {"staging": "room"}, "staging: a local folder needs no staging"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, monkeypatch, dest, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((PackError, StorageError), match=message):
        pack(rows(), dest, **options)
    assert not [*tmp_path.rglob("*.tar*")]


@pytest.fixture(scope="module")
def source(tmp_path_factory, s3) -> tuple[Path, str]:
    """Indexed pictures, local and in the bucket; one shard's name must be quoted in URLs, one has a foreign layout."""
    folder = tmp_path_factory.mktemp("source") / "train"
    write_pictures(folder, [30, 0, 12, 25])
    (folder / "p-002.tar").rename(folder / "p-00#2 é.tar")
    (folder / "classes.json").write_text('["a", "b", "c", "d", "e"]')
    with tarfile.open(folder / "q.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("z.txt", "z.cls", "README"):
            member = tarfile.TarInfo(name)
            member.size = 700
            tar.addfile(member, io.BytesIO(b"1" * 700))
    index_folder(folder, workers=1)
    for path in folder.iterdir():
        if not path.name.startswith("."):
            put(f"{s3}/{BUCKET}/source/train/{quote(path.name)}", path.read_bytes())
    return folder, f"{BUCKET}/source/train"


CHANGES = {
    "merged": {},
    "shuffled": {"shuffle": 3, "max_samples": 9},
    "in processes": {"shuffle": 3, "max_samples": 30, "workers": 2, "check": "sha256"},
    "filtered": {"filter": "json.number >= 20 and cls in (1, 2)", "missing": "skip", "keep": "cls,txt,json"},
    "renamed": {"rename": "txt=caption.txt", "keys": "hashed"},
    "re-sized": {
        "rename": "jpg=png",
        "resize": 8,
        "drop": "txt",
        "max_samples": 40,
        "filter": "json.number >= 0",
        "missing": "skip",
    },
}


@pytest.mark.parametrize("how", CHANGES)
def test_remote_shards_become_what_their_copies_become(tmp_path, source, how):
    folder, url = source
    reshard(f"s3://{url}", tmp_path / "there" / "out", **CHANGES[how])
    reshard(str(folder), tmp_path / "here" / "out", **{**CHANGES[how], "workers": 1})
    assert bytes_in(tmp_path / "there" / "out") == bytes_in(tmp_path / "here" / "out")


def test_shards_without_an_index_named_one_by_one_or_listed(tmp_path, s3, source):
    folder, _ = source
    for name in ("p-000.tar", "q.tar"):
        put(f"{s3}/{BUCKET}/bare/{name}", (folder / name).read_bytes())
    reshard(f"{s3}/{BUCKET}/bare/{{p-000,q}}.tar", tmp_path / "there" / "out", shuffle=1)
    reshard(f"s3://{BUCKET}/bare/*.tar", tmp_path / "listed" / "out", shuffle=1)
    assert bytes_in(tmp_path / "listed" / "out") == bytes_in(tmp_path / "there" / "out")
    reshard([str(folder / "p-000.tar"), str(folder / "q.tar")], tmp_path / "here" / "out", shuffle=1)
    there = {name: data for name, data in bytes_in(tmp_path / "there" / "out").items() if name != "classes.json"}
    here = {name: data for name, data in bytes_in(tmp_path / "here" / "out").items() if name != "classes.json"}
    assert there == here


def test_a_stopped_run_goes_on_from_a_copy_of_its_source(tmp_path, source):
    """The bytes of the source identify the finished shards, for any place of the source."""
    folder, url = source
    reshard(f"s3://{url}", tmp_path / "out")
    assert reshard(str(folder), tmp_path / "out").was_done


def test_from_a_bucket_to_a_bucket(tmp_path, source, url):
    folder, there = source
    reshard(f"s3://{there}", url, max_samples=20, shuffle=2)
    reshard(str(folder), tmp_path / "here" / "out", max_samples=20, shuffle=2)
    assert bytes_at(url) == bytes_in(tmp_path / "here" / "out")


def test_an_object_that_is_damaged_or_replaced_gives_no_shard(tmp_path, s3, source, monkeypatch):
    folder, _ = source
    base = f"{s3}/{BUCKET}/{tmp_path.name}"
    for path in folder.iterdir():
        if not path.name.startswith("."):
            put(f"{base}/{quote(path.name)}", path.read_bytes())
    data = bytearray((folder / "p-000.tar").read_bytes())
    data[600] ^= 1  # a byte of a payload, which no header covers
    put(f"{base}/p-000.tar", bytes(data))
    with pytest.raises(FolderIndexError, match=r"p-000.tar: its sha256 is not the one in the index"):
        reshard(f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "out")
    put(f"{base}/p-000.tar", (folder / "p-000.tar").read_bytes())
    pack_planned = api.fill_and_publish

    def replaced(*arguments):
        put(f"{base}/p-000.tar", bytes(data))
        return pack_planned(*arguments)

    monkeypatch.setattr("wdskit.packing.reshard.fill_and_publish", replaced)
    with pytest.raises(StorageError, match="replaced while it was read"):
        reshard(f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()


def test_selections_of_remote_shards_are_refused(source):
    with pytest.raises(PackError, match="a selection needs local shards"):
        select(f"s3://{source[1]}", "few", sample="10%")
