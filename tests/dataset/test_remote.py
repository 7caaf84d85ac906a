"""Versions of objects: an object that was replaced is an error in later epochs and runs, or is read again."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from folders import ALL
from parts import wait
from shards import number_of, write_numbers

import wdskit
from wdskit import Pipeline, ShardError, StorageError
from wdskit.errors import SelectionError
from wdskit.shards.index import index_folder
from wdskit.storage import requests
from wdskit.storage.cache import parts_of

VALIDATORS = {
    "strong": lambda data, changes: {"ETag": f'"{hashlib.md5(data).hexdigest()}"'},
    "weak and a time": lambda data, changes: {"ETag": 'W/"x"', "Last-Modified": time_of(changes)},
    "a time": lambda data, changes: {"Last-Modified": time_of(changes)},
    "weak": lambda data, changes: {"ETag": 'W/"x"'},
    "nothing": lambda data, changes: {},
    "1970": lambda data, changes: {"Last-Modified": "Thu, 01 Jan 1970 00:00:00 GMT"},
}
GOOD = ("strong", "weak and a time", "a time")
BAD = ("weak", "nothing", "1970")


def time_of(changes: int) -> str:
    return f"Mon, 05 Jan 2026 10:00:{changes:02d} GMT"


class Store(http.server.ThreadingHTTPServer):
    """Serves ranges of `files`, with the headers of one of `VALIDATORS`."""

    daemon_threads = True

    def __init__(self, kind: str) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.kind, self.changes = kind, 0
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.busy: set[str] = set()
        self.changed: dict[str, int] = {}
        self.url = f"http://127.0.0.1:{self.server_port}/"

    def upload(self, folder: Path, *, names: str = "*") -> None:
        """Upload the files with these names."""
        self.changes += 1
        files = {path.name: path.read_bytes() for path in folder.glob(names) if path.is_file()}
        self.files |= files
        self.changed |= dict.fromkeys(files, self.changes)

    def handle_error(self, *_: Any) -> None:
        """Ignore connections of processes that have ended."""


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Store

    def do_GET(self) -> None:
        data = self.server.files.get(self.path[1:])
        self.server.asked.append(self.path[1:])
        if data is None:
            self.send_response(503 if self.path[1:] in self.server.busy else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        start, stop = (int(asked[1]), min(int(asked[2]) + 1, len(data))) if asked else (0, len(data))
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(stop - start))
        for name, value in VALIDATORS[self.server.kind](data, self.server.changed[self.path[1:]]).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[start:stop])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def store(request, tmp_path, monkeypatch):
    """A store with the validators that the test names, which serves two shards of thirty numbers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    requests.loop_of_this_process("").stores.clear()
    write_numbers(tmp_path / "data", [30, 30])
    index_folder(tmp_path / "data", workers=1)
    with Store(request.param) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        server.upload(tmp_path / "data")
        yield server
        server.shutdown()


def other_numbers(folder: Path) -> None:
    """Replace each 7 by 8: shards of the same layout with other numbers."""
    for path in folder.glob("*.tar"):
        path.write_bytes(path.read_bytes().replace(b"7" + bytes(511), b"8" + bytes(511)))


OLD = [*range(60)]


def make(store: Store, tmp_path: Path, *, cache: bool, workers: int = 0) -> Any:
    kept = {"cache": {"dir": str(tmp_path / "kept"), "size": "1GB"}} if cache else {}
    pipe = Pipeline().sequential(store.url).map(number_of).batched(4)
    return pipe.loader(workers=workers, persistent_workers=False, **kept)


def read(loader: Any) -> list[int]:
    found = [int(number) for numbers, mask in loader for number, one in zip(numbers, mask, strict=True) if one]
    if (kept := getattr(loader.program.reader, "cache", None)) is not None:
        wait(kept)
    return found


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("store", GOOD[:1], indirect=True)
def test_one_list_may_name_local_and_remote_folders(store, tmp_path, swapped, cache):
    write_numbers(tmp_path / "local", [20, 20, 20])
    index_folder(tmp_path / "local", workers=1)
    kept = {"cache": {"dir": str(tmp_path / "kept"), "size": "1GB"}} if cache else {}
    folders = [str(tmp_path / "local"), store.url][:: -1 if swapped else 1]
    for pipe in (Pipeline().exact(folders, seed=3), Pipeline().exact("::".join(folders), seed=3)):
        for stages in (pipe.map(number_of).batched(4), pipe.batched(4)):
            loader = stages.loader(workers=0, **kept)
            batches = [batch for _ in range(2) for batch in loader]
            found = [batch["__key__"] if isinstance(batch, dict) else batch.tolist() for batch in batches]
            numbers = [int(str(key).strip("n")) for batch in found for key in batch]
            assert sorted(numbers) == sorted(2 * [*range(60), *range(60)])
    planned = wdskit.plan(pipe.batched(4), world_size=2, gpus_per_node=1)
    assert planned.num_shards == 5
    name = loader.program.describe(0, int(loader.program.order.take([0])[1][0]))
    assert "s-00" in name


WAYS = [(0, 1), (0, 3), (2, 2)]
"""Workers and threads."""
ALL_VERSIONS = [*itertools.product(GOOD, WAYS, [False, True])]
SOME_VERSIONS = [("strong", WAYS[0], True), ("a time", WAYS[1], True), ("strong", WAYS[2], False)]


@pytest.mark.parametrize(("store", "way", "cache"), ALL_VERSIONS if ALL else SOME_VERSIONS, indirect=["store"])
def test_no_epoch_holds_a_sample_of_a_shard_that_was_replaced_meanwhile(store, tmp_path, way, cache):
    """An epoch has the samples of the indexed shards, or ends with an error that names a shard."""
    workers, threads = way
    kept = {"cache": {"dir": str(tmp_path / "kept"), "size": "1GB"}} if cache else {}
    pipe = Pipeline().exact(store.url, seed=3, lanes=6, window=10).map(number_of).batched(4)
    steps = iter(pipe.loader(workers=workers, threads=threads, **kept))
    found = [number for _ in range(3) for number in next(steps).tolist()]
    other_numbers(tmp_path / "data")
    store.upload(tmp_path / "data", names="*.tar")
    with contextlib.suppress(ShardError, StorageError):
        found += [number for batch in steps for number in batch.tolist()]
        assert sorted(found) == OLD
    assert len({*found}) == len(found)  # numbers of the other shard also belong to old samples


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("store", [*GOOD, *BAD], indirect=True)
def test_a_data_set_that_is_replaced_with_its_index_is_read_anew(store, tmp_path, cache):
    """If the store has no versions, no stored part and no old copy of the index is used."""
    for number in range(3):
        write_numbers(tmp_path / "data", [30, 30])
        if number:
            other_numbers(tmp_path / "data")
        index_folder(tmp_path / "data", workers=1)
        store.upload(tmp_path / "data")
        expected = [8 if number and at == 7 else at for at in OLD]
        found = read(make(store, tmp_path, cache=cache))
        assert [at for at in found if at % 10 not in (7, 8)] == [at for at in expected if at % 10 not in (7, 8)]
        assert (7 in found) == (not number)
        if cache and store.kind in BAD:
            assert not [*parts_of(tmp_path / "kept")]


@pytest.mark.parametrize("store", ["strong"], indirect=True)
def test_a_damaged_copy_of_a_column_is_removed_and_then_fetched_again(store, tmp_path):
    index_folder(tmp_path / "data", columns="cls", workers=1)
    store.upload(tmp_path / "data")
    pipe = Pipeline().sequential(store.url, where="cls in [1, 30]").map(number_of).batched(2)
    assert read(pipe.loader(workers=0)) == [1, 30]
    [copy] = (tmp_path / "home").rglob("cls.*.npy")
    whole, place = copy.read_bytes(), f"{store.url[:-1]}: column cls"
    for at in (3, 40, len(whole) - 2):  # in the magic, the header and a value
        copy.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(SelectionError, match=rf"^{place}: its file is damaged. Its copy .* is removed.\n  Run"):
            pipe.loader(workers=0)
        assert not copy.exists()
        assert read(pipe.loader(workers=0)) == [1, 30]
        assert copy.read_bytes() == whole


@pytest.mark.parametrize("store", ["strong"], indirect=True)
def test_a_stream_compares_the_size_of_a_shard_with_its_index(store, tmp_path):
    pipe = Pipeline().stream(store.url, shuffle_shards=False).map(number_of)
    assert list(pipe.loader(workers=0)) == OLD
    path = tmp_path / "data" / "s-001.tar"
    path.write_bytes(path.read_bytes() + bytes(10240))
    store.upload(tmp_path / "data", names="*.tar")
    numbers = iter(pipe.loader(workers=0))
    assert list(itertools.islice(numbers, 30)) == OLD[:30]
    with pytest.raises(ShardError, match=r"s-001.tar.* bytes, but the folder's index says"):
        next(numbers)


@pytest.mark.parametrize("store", ["strong"], indirect=True)
def test_a_copy_that_others_may_write_to_is_refused(store, tmp_path):
    make(store, tmp_path, cache=False)
    copies = tmp_path / "home" / "wdskit" / "folders"
    [copy] = copies.iterdir()
    for folder in (copies, copy):
        folder.chmod(0o777)
        with pytest.raises(StorageError, match=r"the index of http.* cannot be stored here: other users own"):
            make(store, tmp_path, cache=False)
        folder.chmod(0o700)


@pytest.mark.parametrize("store", ["strong"], indirect=True)
def test_many_loaders_copy_the_index_at_the_same_time(store, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: make(store, tmp_path, cache=False), range(80)))
