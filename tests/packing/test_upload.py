"""Packing into a bucket: the objects are the files of a local run, `index.json` is put last, and no object of another
writer is replaced.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from disks import ALL, FailingDisk, HastyDisk, Stopped, StoppingDisk, WatchedDisk, on
from formats import files_in, make_photos, write_tar
from object_server import BUCKET, put, read_from
from store_proxy import DROP, StoreProxy

from wdskit import PackError, StorageError, WdskitError, columns, info, pack, reshard, verify
from wdskit.storage import buckets, requests
from wdskit.storage.buckets import list_objects
from wdskit.storage.urls import read_bytes

pytestmark = pytest.mark.usefixtures("hasty_disk")

QUICK = {"workers": 1}


@pytest.fixture(autouse=True)
def _environment(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_from(s3, monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(requests, "WAIT_S", 0.001)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{tmp_path.name}/out"


def rows(num: int = 12) -> list[dict[str, Any]]:
    return [{"__key__": f"k{number:03d}", "txt": f"text {number} " * 50, "cls": number % 3} for number in range(num)]


def objects_at(url: str) -> dict[str, bytes]:
    """Return the objects of a folder in a bucket, as `files_in` does for files."""
    names = {unquote(one.url.removeprefix(f"{url}/")): one.url for one in list_objects(url)}
    return {name: read_bytes(at, limit=1 << 30) for name, at in names.items() if not name.startswith(".wdskit")}


def locally(tmp_path: Path, source: Any = None, **options: Any) -> dict[str, bytes]:
    pack(rows() if source is None else source, tmp_path / "here" / "out", **QUICK, **options)
    return files_in(tmp_path / "here" / "out")


@contextlib.contextmanager
def cut_line(end: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the upload of an object with this end of its name fail, and with it the run."""
    upload = buckets._upload

    async def failing(location: Any, path: Any, num_bytes: int) -> Any:
        if re.search(f"{end}$", location.key):
            raise StorageError("the line is cut")
        return await upload(location, path, num_bytes)

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="the line is cut"):
        patch.setattr(buckets, "_upload", failing)
        yield


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"max_samples": 5},
    "shuffled in processes": {"max_samples": 5, "shuffle": 3, "workers": 2},
    "split": {"split": "train=0.7,val=0.3", "max_samples": 3},
    "columns": {"columns": "cls,txt.length", "max_samples": 5},
    "rejected": {"skip_bad": True, "max_samples": 5},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_bucket_gets_the_bytes_of_a_local_run(tmp_path: Path, url: str, way: str) -> None:
    source = [*rows(), {"__key__": "bad", "jpg": b"x"}] if way == "rejected" else rows()
    result = pack(source, url, **{**QUICK, **WAYS[way]})
    pack(source, tmp_path / "here" / "out", **{**QUICK, **WAYS[way], "workers": 1})
    assert objects_at(url) == files_in(tmp_path / "here" / "out")
    assert (result.folder, result.num_samples) == (url, 12)
    assert verify(url).is_clean
    assert not [*(tmp_path / "cache").glob("*/uploads/**/.wdskit")]
    if way == "columns":
        assert columns(url)["cls"].tolist() == [number % 3 for number in range(12)]


def test_classes_of_a_folder_are_uploaded_and_a_generator_and_tars_are_packed(tmp_path: Path, url: str) -> None:
    photos = make_photos(tmp_path / "photos", {"cat": 4, "dog": 3})
    tars = write_tar(tmp_path / "a b.tar", {f"k{n}": {"txt": b"%d" % n} for n in range(5)})
    for name, source in (("photos", photos), ("rows", iter(rows())), ("tars", tars), ("v1.0 é", photos)):
        pack(source, f"{url}/{name}", max_samples=3, **QUICK)
        pack(iter(rows()) if name == "rows" else source, tmp_path / "d" / name, max_samples=3, **QUICK)
        assert objects_at(f"{url}/{quote(name)}") == files_in(tmp_path / "d" / name)
    assert info(f"{url}/photos").num_samples == 7
    reshard(f"{url}/photos", f"{url}/again", shuffle=1, **QUICK)
    reshard(tmp_path / "d" / "photos", tmp_path / "d" / "again", shuffle=1, **QUICK)
    assert objects_at(f"{url}/again") == files_in(tmp_path / "d" / "again")


def test_few_shards_are_on_the_local_disk_at_a_time(tmp_path: Path, url: str) -> None:
    counts = []

    class CountingDisk(HastyDisk):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            counts.append(len([*(tmp_path / "cache").rglob("*.tar")]))

    on(CountingDisk(), pack, rows(60), url, max_samples=2, workers=1)
    assert len(objects_at(url)) == 61
    assert max(counts) == 1


def test_a_done_run_uploads_nothing_and_another_is_refused(url: str) -> None:
    pack(rows(), url, max_samples=5, **QUICK)
    before = {one.url: one.etag for one in list_objects(url)}
    assert pack(rows(), url, max_samples=5, **QUICK).was_done
    for source, options in ((rows(), {"max_samples": 6}), (rows()[1:], {"max_samples": 5})):
        with pytest.raises(PackError, match=rf"^{url}: another data set is here"):
            pack(source, url, **QUICK, **options)
    assert {one.url: one.etag for one in list_objects(url)} == before


@pytest.mark.parametrize("name", ["out-000001.tar", "out-000000.tar.idx"])
def test_an_object_of_another_writer_is_not_replaced(s3: str, url: str, name: str) -> None:
    put(f"{s3}/{url.removeprefix('s3://')}/{name}", b"precious")
    with pytest.raises(PackError, match=name):
        pack(rows(), url, max_samples=5, **QUICK)
    assert objects_at(url) == {name: b"precious"}


@pytest.mark.parametrize("name", ["out-000000.tar", "out-000001.tar.idx"])
@pytest.mark.parametrize("has_own_size", [True, False])
def test_a_run_that_goes_on_takes_no_object_of_another_writer_for_its_own(
    s3: str, url: str, monkeypatch: pytest.MonkeyPatch, name: str, has_own_size: bool
) -> None:
    """Uploads of this run have ETags that the entries store."""
    with cut_line("2.tar", monkeypatch):
        pack(rows(), url, max_samples=3, **QUICK)
    before = objects_at(url)
    assert name in before
    precious = bytes(len(before[name])) if has_own_size else b"precious"
    put(f"{s3}/{url.removeprefix('s3://')}/{name}", precious)
    with pytest.raises(PackError, match=name.removesuffix(".idx")):
        pack(rows(), url, max_samples=3, **QUICK)
    assert objects_at(url).items() >= {**before, name: precious}.items()
    put(f"{s3}/{url.removeprefix('s3://')}/{name}", method="DELETE")
    pack(rows(), url, max_samples=3, **QUICK)
    assert verify(url).is_clean


def test_a_shard_or_an_index_of_another_writer_during_the_run_is_an_error(s3: str, url: str) -> None:
    base = f"{s3}/{url.removeprefix('s3://')}"

    def act(stage: str, num: int, _: int | None) -> None:
        if stage == "packing" and num == 12:
            put(f"{base}/index.json", b"{}")

    with pytest.raises(WdskitError, match=r"another writer has changed index\.json"):
        pack(rows(), url, max_samples=3, progress=act, **QUICK)
    assert objects_at(url)["index.json"] == b"{}"


# Kills.

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

if __name__ == "__main__":
    buckets._upload = killed
    pack(json.loads(sys.argv[4]), sys.argv[1], max_samples=5, workers=1)
"""
POINTS = [(number, place) for number in range(8) for place in ("before", "after")]


@pytest.mark.parametrize(("at", "place"), POINTS if ALL else [(0, "after"), (3, "after"), (6, "before"), (7, "after")])
def test_a_run_killed_between_put_and_entry_goes_on_and_the_index_is_last(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, at: int, place: str
) -> None:
    child = subprocess.run([sys.executable, "-c", CHILD, url, str(at), place, json.dumps(rows())], check=False)
    assert child.returncode == -signal.SIGKILL
    there = objects_at(url)
    assert ("index.json" in there) == ((at, place) == (7, "after"))
    assert "index.json" not in there or verify(url).is_clean
    notes = [json.loads(path.read_bytes().splitlines()[0]) for path in (tmp_path / "cache").rglob("*.put")]
    uploaded = {name for note in notes for name in note["etags"]}
    sent: list[str] = []
    upload = buckets._upload

    async def count(location: Any, path: Any, num_bytes: int) -> Any:
        sent.append(location.key.rpartition("/")[2])
        return await upload(location, path, num_bytes)

    monkeypatch.setattr(buckets, "_upload", count)
    pack(rows(), url, max_samples=5, **QUICK)
    assert objects_at(url) == locally(tmp_path, max_samples=5)
    assert verify(url).is_clean
    assert not uploaded & {*sent}
    assert not sent or sent[-1] == "index.json"


@pytest.mark.parametrize("how", ["killed", "full disk"])
def test_a_run_that_stops_at_any_disk_operation_goes_on(tmp_path: Path, url: str, how: str) -> None:
    disk = WatchedDisk()
    on(disk, pack, rows(), f"{url}/whole/out", max_samples=5, workers=1)
    whole = objects_at(f"{url}/whole/out")
    num = len(disk.operations)
    assert num > 40
    for number in range(3, num, 1 if ALL else 13):
        dest = f"{url}/{number}/out"
        try:
            stop = StoppingDisk(number) if how == "killed" else FailingDisk(number, errno.ENOSPC)
            on(stop, pack, rows(), dest, max_samples=5, workers=1)
        except Stopped:
            pass
        except WdskitError as err:
            assert os.strerror(errno.ENOSPC) in str(err)  # noqa: PT017 (or no error)
        found = objects_at(dest)
        assert found.items() <= whole.items()
        assert "index.json" not in found or found == whole
        pack(rows(), dest, max_samples=5, **QUICK)
        assert objects_at(dest) == whole
        assert not [*(tmp_path / "cache").rglob("*.tar")]


@pytest.mark.parametrize("end", ["00000.tar", "1.tar", "1.tar.idx", "cls.*npy", "columns.json", "index.json"])
def test_a_run_stopped_with_other_names_or_columns_goes_on(url: str, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """A run was stopped, and so was a second one of the same rows, at any upload: the first is still known."""
    for stop, options in (("2.tar", {}), (end, {"split": "train=1"})):
        with cut_line(stop, monkeypatch):
            pack(rows(), url, max_samples=3, columns="cls", **QUICK, **options)
    pack(rows(), url, max_samples=3, columns="cls,txt.length", **QUICK)
    assert verify(url).is_clean
    assert columns(url)["cls"].tolist() == [number % 3 for number in range(12)]


# Stores that fail.


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreProxy]:
    with StoreProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        requests.loop_of_this_process("").stores.clear()
        yield proxy


@pytest.mark.parametrize("fault", [503, DROP])
def test_a_store_that_fails_for_now_is_tried_again(tmp_path: Path, url: str, proxy: Any, fault: int) -> None:
    """Small objects, and parts of large ones."""
    source = [{"__key__": str(number), "bin": os.urandom(9 << 20)} for number in range(3)]
    failed: set[str] = set()

    def fail(method: str, path: str) -> int | None:
        if method not in {"PUT", "POST"} or path.partition("?")[0] + method in failed:
            return None
        failed.add(path.partition("?")[0] + method)
        return fault

    proxy.fail = fail
    pack(source, url, max_samples=2, **QUICK)
    assert len(failed) >= 6
    assert any("partNumber=2" in path for _, path in proxy.requests)
    assert objects_at(url) == locally(tmp_path, source, max_samples=2)


def test_a_store_that_fails_for_good_is_an_error_and_the_run_goes_on_later(
    url: str, proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "RETRIES", 2)
    monkeypatch.setattr(requests, "RETRY_S", 0.5)
    for status, message in ((503, "answered 503"), (403, "answered 403 Forbidden")):
        proxy.fail = lambda method, _, status=status: status if method == "PUT" else None
        with pytest.raises(StorageError, match=message):
            pack(rows(), url, max_samples=5, **QUICK)
        assert objects_at(url) == {}
    proxy.fail = lambda *_: None
    pack(rows(), url, max_samples=5, **QUICK)
    assert verify(url).is_clean


@pytest.mark.parametrize(
    ("dest", "options", "message"),
    [
        ("s3://no-such-bucket/out", {}, "there is no such bucket"),
        (f"s3://{BUCKET}", {}, "does not name a folder of a bucket"),
        ("http://127.0.0.1:9/out", {}, "only buckets of s3://, gs://, az:// can be listed or written to"),
        ("hf://datasets/o/n/out", {}, "only buckets"),
        (f"s3://{BUCKET}/x", {"append": True}, "append and part are for local folders"),
        (f"s3://{BUCKET}/x", {"part": "0/2"}, "append and part are for local folders"),
    ],
)
def test_a_destination_that_cannot_be_written_is_refused(dest: str, options: Any, message: str) -> None:
    with pytest.raises((PackError, StorageError), match=message):
        pack(rows(), dest, **QUICK, **options)
