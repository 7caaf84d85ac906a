"""Planned sources over a store: the same batches as from the disk, or an error that says what is wrong."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from digests import digest_of
from folders import HELPERS
from masks import mask_of
from object_server import BUCKET, put, read_from, s3_server
from parts import wait
from shards import index_numbers, number_of, write_numbers, write_pictures
from store_proxy import StoreProxy

import wdskit
from wdskit import FolderIndexError, Pipeline, PipelineError, SelectionError, StorageError
from wdskit.dataset import remote
from wdskit.dataset.index import index_json, read_index
from wdskit.pipeline import settings
from wdskit.shards.index import index_folder
from wdskit.shards.split import split
from wdskit.storage import requests
from wdskit.storage.cache import PartCache, parts_of
from wdskit.storage.objects import ObjectFile
from wdskit.text import parse_bytes


@pytest.fixture(scope="module")
def s3():
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def environment(s3, tmp_path, monkeypatch):
    read_from(s3, monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(requests, "WAIT_S", 0.001)


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """Two local folders, `pictures` and `numbers`, with splits; one shard's name has to be quoted in a URL."""
    folder = tmp_path_factory.mktemp("here")
    write_pictures(folder / "pictures", [20, 0, 32, 25])
    write_numbers(folder / "numbers", [40, 50, 60])
    (folder / "numbers" / "s-002.tar").rename(folder / "numbers" / "s-00#2 é.tar")
    for name in ("pictures", "numbers"):
        index_folder(folder / name, workers=1)
        split(folder / name, {"train": 0.7, "val": 0.3}, seed=3, workers=1)
    return folder


@pytest.fixture(scope="module")
def there(here, s3) -> str:
    """The URL of the two folders in a bucket."""
    upload(here, f"{s3}/{BUCKET}/{here.name}")
    return f"{BUCKET}/{here.name}"


def upload(folder: Path, url: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            put(f"{url}/{quote(str(path.relative_to(folder)))}", path.read_bytes())


def digests(items: Any) -> list[bytes]:
    """Return a digest of each item to the bit, without the places of shards."""
    return [
        digest_of(
            {name: value for name, value in item.items() if name != "__url__"} if isinstance(item, dict) else item
        )
        for item in items
    ]


def images(pipe: Pipeline) -> Pipeline:
    return (
        pipe.decode("rgb8")
        .random_resized_crop(32)
        .random_flip()
        .to_tuple("jpg;png", "cls", "__key__", *mask_of(pipe))
        .batched(8)
    )


SOURCES = {
    "exact": lambda at: images(Pipeline().exact(f"{at}/pictures/*.tar", seed=3)),
    "sequential": lambda at: images(Pipeline().sequential(f"{at}/pictures/")),
    "resampled": lambda at: images(Pipeline().resampled(f"{at}/pictures/p-{{000..003}}.tar", seed=3)),
    "columns": lambda at: Pipeline().exact(f"{at}/numbers/", window=7, lanes=5).to_tuple("cls", "__key__").batched(10),
    "a range of a split": lambda at: (
        Pipeline().exact(f"{at}/numbers/", split="train", range=["10%", "90%"]).to_tuple("cls").batched(4)
    ),
    "samples": lambda at: Pipeline().sequential(f"{at}/numbers/*[!1].tar").map(number_of),
    "mixture": lambda at: (
        Pipeline()
        .exact(mixture=[{"shards": f"{at}/numbers/"}, {"shards": f"{at}/numbers/", "split": "val"}], seed=3)
        .map(number_of)
        .with_epoch(100)
        .batched(5)
    ),
}


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("source", SOURCES)
def test_batches_are_those_of_the_disk(here, there, s3, scheme, source):
    base = f"s3://{there}" if scheme == "s3" else f"{s3}/{there}"
    remote, local = (SOURCES[source](at).loader(workers=0, threads=1) for at in (base, here))
    assert len(remote) == len(local)
    for _ in range(2):
        assert digests(remote) == digests(local)
    assert remote.state_dict() == local.state_dict()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_samples": 1 << 61}, r"s-000.tar.idx: the index says .* too many to be true"),
        ({"num_samples": 1 << 53, "num_bytes": 1 << 62}, r"s-000.tar.idx: the index says .* too many to be true"),
        ({"num_samples": 35}, r"s-000.tar.idx: it has 30 samples, but the index says 35"),
    ],
)
def test_numbers_of_a_remote_index_are_compared_before_so_much_is_asked_for(numbers, change, problem):
    folder, url = numbers
    first, *rest = read_index(folder).entries
    entries = [dataclasses.replace(first, **change), *rest]
    put(f"{url}/index.json", index_json(entries))
    with pytest.raises(FolderIndexError, match=problem):
        read_all(f"{url}/")


@pytest.fixture
def numbers(s3, tmp_path) -> tuple[Path, str]:
    """A folder of this test, on the disk and in the bucket."""
    folder = tmp_path / "own"
    index_numbers(folder, [30, 31])
    url = f"{s3}/{BUCKET}/{tmp_path.name}"
    upload(folder, url)
    return folder, url


def read_all(url: str, **settings: Any) -> list[int]:
    loader = Pipeline().sequential(url, **settings).map(number_of).loader(workers=0)
    return [number for number, is_sample in loader if is_sample]


def test_what_is_missing_or_wrong_is_named(numbers, s3):
    folder, url = numbers
    with pytest.raises(FolderIndexError, match=r"index.json: there is no such object.*\n.*Run `wdskit index` where"):
        read_all(f"{s3}/{BUCKET}/nothing/")
    with StoreProxy(s3) as proxy:
        proxy.fail = lambda _, path: 403 if path.endswith("/index.json") else None
        denied = url.replace(s3, proxy.url)
        with pytest.raises(StorageError, match=r"index.json: the server answered 403 Forbidden .*\.$"):
            read_all(f"{denied}/")
        with pytest.raises(FolderIndexError, match=r"403 Forbidden.*\n  If none is there, run `wdskit index`"):
            list(Pipeline().stream(f"{denied}/").loader(workers=0))
    with pytest.raises(FolderIndexError, match=r"s-009.tar: the folder's index does not list this shard"):
        read_all(f"{url}/s-009.tar")
    with pytest.raises(StorageError, match="no shard matches"):
        read_all(f"{url}/t-*.tar")
    with pytest.raises(SelectionError, match=r"there is no split 'train'. The folder has no split.*\n.*`wdskit split`"):
        read_all(f"{url}/", split="train")
    with pytest.raises(StorageError, match="Leave the query out"):
        read_all(f"{url}/s-000.tar?sig=hush")
    put(f"{url}/s-001.tar.idx", (folder / "s-000.tar.idx").read_bytes())
    with pytest.raises(FolderIndexError, match=r"s-001.tar.idx: .* does not belong to s-001.tar"):
        read_all(f"{url}/")
    put(f"{url}/s-001.tar.idx", (folder / "s-001.tar.idx").read_bytes()[:-8])
    with pytest.raises(FolderIndexError, match=r"s-001.tar.idx"):
        read_all(f"{url}/")


def test_a_machine_that_keeps_nothing_is_told_what_to_set(numbers, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match=r"cannot be stored here: .*\.\n  Set XDG_CACHE_HOME"):
        read_all(f"{numbers[1]}/")


def test_workers_are_not_forked_and_a_forked_process_is_told(numbers):
    _, url = numbers
    pipe = Pipeline().sequential(f"{url}/").map(number_of).batched(5)
    with pytest.raises(PipelineError, match=r"the shards are in a store, so workers cannot be forked\.\n  Use start"):
        pipe.loader(workers=1, start_method="fork")
    with pytest.raises(PipelineError, match=r"as the shards are in a store: .*lambda.*\n.*use workers: 0"):
        Pipeline().sequential(f"{url}/").map(lambda sample: sample).loader(workers=1)
    loader = pipe.loader(workers=0)
    next(iter(loader))
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        try:
            list(pipe.loader(workers=0))
        except StorageError as err:
            os.write(sender, str(err).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(sender)
    with os.fdopen(receiver) as said:
        assert "forkserver" in said.read()


# --- parts in the cache on this machine's disk


def kept(folder: Path) -> dict[str, Any]:
    return {"cache": {"dir": str(folder), "size": "1GB"}}


def kept_by(loader: Any) -> PartCache:
    cache = loader.program.reader.cache
    assert isinstance(cache, PartCache)
    return cache


def wait_for_parts(folder: Path, num: int) -> None:
    deadline = time.monotonic() + 20
    while len([*parts_of(folder)]) < num and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len([*parts_of(folder)]) == num


@pytest.fixture
def small_parts(monkeypatch):
    """Set a part size that gives several parts per shard."""
    monkeypatch.setattr(remote, "CACHE_PART_BYTES", 4096)
    monkeypatch.setattr(settings, "CACHE_PART_BYTES", 4096)


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The URLs that are read from the store."""
    found: list[str] = []
    start_reading = ObjectFile.start_reading

    def noted(self, ranges):
        found.append(self.url)
        return start_reading(self, ranges)

    monkeypatch.setattr(ObjectFile, "start_reading", noted)
    return found


@pytest.mark.parametrize("source", ["exact", "columns", "a range of a split"])
@pytest.mark.usefixtures("small_parts")
def test_a_cache_changes_nothing_but_what_is_downloaded(here, there, tmp_path, asked, source):
    local = SOURCES[source](here).loader(workers=0)
    expected = [digests(local) for _ in range(4)]
    loader = SOURCES[source](f"s3://{there}").loader(workers=0, **kept(tmp_path / "kept"))
    assert [digests(loader) for _ in range(2)] == expected[:2]
    wait(kept_by(loader))
    asked.clear()
    assert digests(loader) == expected[2]
    assert len([url for url in asked if url.endswith(".tar")]) <= 4  # `tail: drop`: samples that were not read before
    other = SOURCES[source](f"s3://{there}").loader(workers=0, **kept(tmp_path / "kept"))
    asked.clear()
    other.set_epoch(3)
    assert digests(other) == expected[3]
    assert len([url for url in asked if url.endswith(".tar")]) <= 8  # plus the version of each shard


@pytest.mark.parametrize("size", [7, 77])
def test_each_byte_of_a_reply_is_counted_once(s3, there, monkeypatch, size):
    """Batches of 7 fetch four times the bytes of the samples: the bytes between samples of a batch, less than
    `GAP_BYTES`, come with them, and again with those of another batch. The cache exists for this.
    """
    ranges: list[int] = []
    right = ObjectFile.request

    async def request(self, store, start, stop, **options):
        reply, end = await right(self, store, start, stop, **options)
        ranges.append(end - start)
        return reply, end

    monkeypatch.setattr(ObjectFile, "request", request)
    pipe = Pipeline().exact(f"{s3}/{there}/pictures/*.tar").to_tuple("png;jpg").batched(size)
    loader = pipe.loader(workers=0, persistent_workers=False)  # otherwise the next epoch is read ahead
    requests.loop_of_this_process("").take_count()  # of earlier tests
    ranges.clear()
    list(loader)
    found = loader.stats()
    assert found.traffic.fetched == sum(ranges)
    assert (found.traffic.fetched > 3 * found.bytes_read) == (size == 7)


@pytest.mark.parametrize("workers", [0, 1])
def test_statistics_say_what_was_fetched(s3, there, tmp_path, workers):
    pipe = Pipeline().exact(f"{s3}/{there}/pictures/*.tar").to_tuple("png;jpg").batched(77)  # each shard is one request
    settings = {"workers": workers, "persistent_workers": False}  # otherwise parts of the next epoch are fetched too
    loader = pipe.loader(**settings)
    list(loader)
    found = loader.stats()
    assert 0.9 < found.traffic.fetched / found.bytes_read < 1.5
    while len([*parts_of(tmp_path / "kept")]) < 3:  # a worker that ends with its epoch may not store all parts
        list(pipe.loader(**settings, **kept(tmp_path / "kept")))
    requests.loop_of_this_process("").take_count()  # of parts that came after the epoch
    loader = pipe.loader(**settings, **kept(tmp_path / "kept"))
    list(loader)
    assert loader.stats().traffic.fetched < 5_000  # offsets


def test_workers_share_what_is_kept(here, there, s3, tmp_path):
    expected = SOURCES["columns"](here).loader(workers=0)
    loader = SOURCES["columns"](f"{s3}/{there}").loader(workers=2, threads=2, **kept(tmp_path / "kept"))
    for _ in range(3):
        assert digests(loader) == digests(expected)
    wait_for_parts(tmp_path / "kept", 3)


@pytest.mark.usefixtures("small_parts")
def test_a_damaged_part_is_fetched_again(here, there, tmp_path, caplog):
    pipe = SOURCES["columns"](f"s3://{there}")
    expected = digests(SOURCES["columns"](here).loader(workers=0))
    loader = pipe.loader(workers=0, **kept(tmp_path / "kept"))
    assert digests(loader) == expected
    wait(kept_by(loader))
    for part in parts_of(tmp_path / "kept"):
        data = bytearray(part.path.read_bytes())
        data[len(data) // 3] ^= 1
        part.path.write_bytes(data)
    assert digests(pipe.loader(workers=0, **kept(tmp_path / "kept"))) == expected
    assert "of the shard is damaged. It is fetched again." in caplog.text


@pytest.mark.usefixtures("small_parts")
def test_parts_of_an_object_that_was_wrong_are_not_those_of_the_right_one(numbers, tmp_path):
    """A shard is replaced by another of its size, read, and restored: stored parts of the wrong shard are not used."""
    folder, url = numbers
    right = (folder / "s-000.tar").read_bytes()
    at = right.index(b"7" + bytes(511))
    put(f"{url}/s-000.tar", right[:at] + b"8" + right[at + 1 :])
    pipe = Pipeline().sequential(f"{url}/").map(number_of)
    for expected in ([*range(7), 8, *range(8, 61)], [*range(61)]):
        for _ in range(2):
            loader = pipe.loader(workers=0, **kept(tmp_path / "kept"))
            assert [number for number, is_sample in loader if is_sample] == expected
            wait(kept_by(loader))
        put(f"{url}/s-000.tar", right)


RANK = """
import json, os, sys
from wdskit import Pipeline
from wdskit.dataset import remote
from shards import number_of
remote.CACHE_PART_BYTES = 4096
url, folder, rank, world_size, killed_at = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
pipe = Pipeline().exact(url, seed=3, lanes=4).map(number_of).batched(global_size=12)
loader = pipe.loader(workers=0, threads=2, rank=rank, world_size=world_size,
                     ranks_per_node=world_size, cache={"dir": folder, "size": "1GB"})
if killed_at < 0:
    loader.load_state_dict(json.load(open(folder + "/state")))
for epoch in range(2):
    for step, batch in enumerate(loader):
        print(*map(int, batch), flush=True)
        if step + 1 == killed_at and epoch == 1:
            if rank == 0:
                json.dump(loader.state_dict(), open(folder + "/state", "w"))
            os.kill(os.getpid(), 9)
"""


def test_a_run_that_was_killed_goes_on_with_its_cache_on_other_ranks(here, there, tmp_path):
    """Both ranks are killed in the second epoch; three resume, and each step equals that of one rank on the disk."""
    environment = {**os.environ, "PYTHONPATH": str(HELPERS)}
    (tmp_path / "kept").mkdir(0o700)

    def run(world_size: int, killed_at: int) -> list[list[int]]:
        """Return the samples of each step of all ranks."""
        words = [sys.executable, "-c", RANK, f"s3://{there}/numbers/", str(tmp_path / "kept")]
        ranks = [
            subprocess.Popen(
                [*words, *map(str, (rank, world_size, killed_at))], env=environment, stdout=subprocess.PIPE, text=True
            )
            for rank in range(world_size)
        ]
        printed = [process.communicate(timeout=60)[0].splitlines() for process in ranks]
        assert {process.returncode for process in ranks} == {-signal.SIGKILL if killed_at > 0 else 0}
        return [sorted(int(word) for line in lines for word in line.split()) for lines in zip(*printed, strict=True)]

    found = run(2, 5)
    found += run(3, -1)
    loader = (
        Pipeline().exact(f"{here}/numbers/", seed=3, lanes=4).map(number_of).batched(global_size=12).loader(workers=0)
    )
    expected = [sorted(int(number) for number in batch) for _ in range(3) for batch in loader]
    assert found == expected
    assert len(list((tmp_path / "kept").glob("*/*.part"))) >= 3


def test_columns_of_a_bucket_are_packed_and_indexed(s3, tmp_path):
    url = f"s3://{BUCKET}/{tmp_path.name}"
    rows = [{"__key__": f"k{n:02d}", "cls": n, "json": {"kind": "ab"[n % 2]}} for n in range(30)]
    wdskit.pack(rows, url, max_samples=8, columns="cls,json.kind")
    found = wdskit.columns(url)
    assert found["cls"].tolist() == list(range(30))
    assert [found["json.kind"][n] for n in range(30)] == ["ab"[n % 2] for n in range(30)]
    pipe = Pipeline().sequential(f"{url}/", where="json.kind == 'b' and cls > 9").map(number_of)
    assert [number for number, is_sample in pipe.loader(workers=0) if is_sample] == list(range(11, 30, 2))
    report = index_folder(url, columns="big=json.kind.length", drop_columns="json.kind", workers=1)
    assert report.columns == ("cls", "big")
    assert wdskit.columns(url)["big"].tolist() == [1] * 30
    index_folder(url, drop_columns="cls,big", workers=1)
    assert list(wdskit.columns(url)) == []
    index_folder(url, columns="cls,big=json.kind.length", workers=1)
    assert wdskit.verify(f"{url}/").is_clean
    assert [column.name for column in wdskit.info(f"{url}/").columns] == ["cls", "big"]
    put(f"{s3}/{BUCKET}/{tmp_path.name}/columns.json", b"{}")
    with pytest.raises(SelectionError, match=rf"^{url}/columns.json: it is damaged"):
        wdskit.info(f"{url}/")


@pytest.mark.parametrize("where", [None, "cls % 9 == 1"])
def test_the_loader_takes_the_cache_that_its_error_names_and_no_smaller_one(s3, tmp_path, where):
    """Whole parts are fetched, also if few of their samples are selected."""
    folder = tmp_path / "own"
    write_numbers(folder, [40, 30, 50])
    index_folder(folder, columns="cls", workers=1)
    upload(folder, f"{s3}/{BUCKET}/{tmp_path.name}")
    pipe = Pipeline().exact(f"s3://{BUCKET}/{tmp_path.name}/", seed=5, where=where).map(number_of).batched(2)
    make = functools.partial(pipe.loader, workers=0, persistent_workers=None)
    with pytest.raises(PipelineError, match="must keep") as refused:
        make(cache={"dir": str(tmp_path / "cache"), "size": "1kB"})
    least = parse_bytes(str(refused.value).partition("Set `cache.size: ")[2].partition("`")[0])
    assert least >= 0.9 * sum(path.stat().st_size for path in folder.glob("*.tar"))
    loader = make(cache={"dir": str(tmp_path / "cache"), "size": str(least)})
    fetched = []
    for _ in range(3):
        assert len(list(loader)) == (120 if where is None else 14) // 2
        wait(kept_by(loader))
        fetched.append(sorted(part.name for part in parts_of(tmp_path / "cache")))
    assert fetched[0] == fetched[1] == fetched[2] != []
    with pytest.raises(PipelineError, match="must keep"):
        make(cache={"dir": str(tmp_path / "cache"), "size": str(least * 7 // 10)})
