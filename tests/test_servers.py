"""The same promises on each kind of store: reads return the right bytes, or an error that says what is wrong.

`make test` runs them on seaweedfs and moto; `make long` on all servers, and lists those that are not installed.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from folders import ALL
from object_server import SERVERS, Server, read_ranges
from shards import number_of, write_numbers

import wdskit
from wdskit import FolderIndexError, Pipeline, StorageError
from wdskit.shards.index import index_folder
from wdskit.storage import requests
from wdskit.storage.buckets import list_objects
from wdskit.storage.objects import ObjectFile
from wdskit.storage.urls import open_stream, read_bytes, scheme_of

FAIR_PART = ("seaweedfs", "moto")
BODY = random.Random(11).randbytes(3_000_000)
NAMES = ["a b.tar", "c+d&e=f.tar", "é雪\U0001f600.tar", "p%41q.tar", "p%2Fq.tar", "#?.tar", "a'b(1)~!*.tar"]
LISTED = ("s3", "gs", "az")
SECRET = "hush" * 3


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Set a home folder without credentials."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(requests, "WAIT_S", 0.001)
    requests.loop_of_this_process("").stores.clear()
    yield
    requests.loop_of_this_process("").stores.clear()


@pytest.fixture(scope="module", params=[name for name in SERVERS if ALL or name in FAIR_PART])
def running(request) -> Iterator[Server]:
    with SERVERS[request.param]() as server:
        yield server


@pytest.fixture
def server(running, monkeypatch) -> Server:
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    return running


@pytest.fixture
def at(server, tmp_path) -> str:
    """The URL of a folder that only this test uses."""
    return f"{server.url}/{tmp_path.name}"


@pytest.fixture
def numbers(server, at, tmp_path) -> Path:
    """Shards of 40, 50 and 60 samples on the disk and, without an index, in the store."""
    write_numbers(tmp_path / "numbers", [40, 50, 60])
    upload(server, tmp_path / "numbers", at)
    return tmp_path / "numbers"


def upload(server: Server, folder: Path, url: str) -> None:
    for path in sorted(folder.iterdir()):
        server.put(f"{url.removeprefix(server.url)[1:]}/{path.name}", path.read_bytes())


def put_at(server: Server, url: str, data: bytes) -> None:
    server.put(url.removeprefix(server.url)[1:], data)


def problem(read, *arguments) -> str:
    with pytest.raises(StorageError) as caught:
        read(*arguments)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


def test_ranges_are_the_true_bytes(server, at):
    put_at(server, f"{at}/one.tar", BODY)
    draw = random.Random(3)
    ranges = [(start, min(len(BODY), start + draw.randrange(200_000))) for start in draw.sample(range(len(BODY)), 30)]
    file = ObjectFile(f"{at}/one.tar")
    assert read_ranges(file, ranges) == [BODY[start:stop] for start, stop in ranges]
    assert (file.num_bytes, file.read_at(len(BODY) - 3, 10), file.read_at(len(BODY), 10)) == (len(BODY), BODY[-3:], b"")
    assert file.etag
    put_at(server, f"{at}/empty.tar", b"")
    assert (ObjectFile(f"{at}/empty.tar").read_at(0, 10), ObjectFile(f"{at}/empty.tar").num_bytes) == (b"", 0)


def test_a_stream_is_the_whole_object(server, at, numbers):
    put_at(server, f"{at}/one.tar", BODY)
    assert read_bytes(f"{at}/one.tar", limit=len(BODY)) == BODY
    pipe = Pipeline().stream(f"{at}/s-{{000..002}}.tar", shuffle_shards=False).map(number_of)
    assert list(pipe.loader(workers=0)) == [*range(150)]


def test_any_name_is_listed_and_read(server, at):
    for name in NAMES:
        put_at(server, f"{at}/names/{name}", name.encode())
    put_at(server, f"{at}/names/deep/er.tar", b"deep")
    for name in NAMES:
        assert read_bytes(f"{at}/names/{quote(name)}", limit=100) == name.encode()
        assert ObjectFile(f"{at}/names/{quote(name)}").read_at(0, 100) == name.encode()
    if scheme_of(at) not in LISTED:
        assert "can be listed" in problem(list_objects, f"{at}/names/")
        return
    found = list_objects(f"{at}/names/")
    assert sorted(each.url for each in found) == sorted(f"{at}/names/{quote(name)}" for name in NAMES)
    for each in found:
        file = ObjectFile(each.url, num_bytes=each.num_bytes, etag=each.etag)
        assert quote(file.read_at(0, 100)) == each.url.rpartition("/")[2]
    assert list_objects(f"{at}/none/") == []


def test_exact_batches_are_those_of_the_disk(server, at, numbers, tmp_path):
    """The index is the one that `wdskit index` writes into the bucket, or an uploaded one."""
    if scheme_of(at) in ("s3", "az"):  # fake-gcs-server takes uploads by another protocol than the cloud's XML
        assert wdskit.index_folder(f"{at}/", workers=1).index.num_samples == 150
        index_folder(numbers, workers=1)
        for path in numbers.iterdir():
            if not path.name.startswith("."):
                assert read_bytes(f"{at}/{path.name}", limit=1 << 20) == path.read_bytes(), path.name
    else:
        index_folder(numbers, workers=1)
        upload(server, numbers, at)

    def loader(folder: str, **settings: Any) -> Any:
        pipe = Pipeline().exact(f"{folder}/", seed=5, window=16, lanes=4).to_tuple("cls", "__key__").batched(8)
        return pipe.loader(workers=0, **settings)

    kept = {"cache": {"dir": str(tmp_path / "kept"), "size": "1GB"}}
    here = loader(str(numbers))
    for there in (loader(at), loader(at, **kept)):
        for epoch in range(2):
            here.set_epoch(epoch)
            expected = list(here)
            assert (len(expected), list(there)) == (18, expected)


def test_a_replaced_object_is_an_error(server, at, numbers):
    """The error comes at its first byte, although the new object has the old size."""
    put_at(server, f"{at}/one.tar", BODY)
    file = ObjectFile(f"{at}/one.tar")
    assert file.read_at(0, 9) == BODY[:9]
    put_at(server, f"{at}/one.tar", BODY[::-1])
    assert "was replaced while it was read" in problem(file.read_at, 9, 9)
    assert ObjectFile(f"{at}/one.tar").read_at(0, 9) == BODY[::-1][:9]
    index_folder(numbers, workers=1)
    upload(server, numbers, at)
    items = iter(Pipeline().sequential(f"{at}/").map(number_of).batched(2).loader(workers=0, prefetch=1))
    assert [next(items)[0].tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    put_at(server, f"{at}/s-000.tar", (numbers / "s-000.tar").read_bytes().replace(b"n0000", b"m0000"))
    assert "was replaced while it was read" in problem(list, items)


def test_what_is_missing_is_named(server, at, numbers):
    for read in (open_stream, lambda url: ObjectFile(url).read_at(0, 3)):
        text = problem(read, f"{at}/none.tar")
        assert text.startswith(f"{at}/none.tar: ")
        assert "there is no such object" in text or "404" in text
    with pytest.raises(FolderIndexError, match=r"index\.json: there is no such object"):
        Pipeline().sequential(f"{at}/").map(number_of).loader(workers=0)
    index_folder(numbers, workers=1)
    (numbers / "s-001.tar").unlink()
    put_at(server, f"{at}/gone/nothing", b"")
    upload(server, numbers, f"{at}/gone")
    assert "gone/s-001.tar: there is no such object" in problem(
        list, Pipeline().sequential(f"{at}/gone/").map(number_of).loader(workers=0)
    )


def test_a_bucket_that_is_not_there_is_named(server, monkeypatch):
    if scheme_of(server.url) not in LISTED:
        pytest.skip("it has no buckets")
    scheme = scheme_of(server.url)
    text = problem(list_objects, f"{scheme}://no-such-bucket/a/")
    assert text.startswith(f"{scheme}://no-such-bucket/a/: ")
    text = problem(ObjectFile(f"{scheme}://no-such-bucket/a.tar").read_at, 0, 3)
    assert text.startswith(f"{scheme}://no-such-bucket/a.tar: ")
