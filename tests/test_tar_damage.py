"""Damaged shards: whole samples up to the damage, then an error; never a partial or another sample."""

from __future__ import annotations

import io
import tarfile
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import write_shard
from tar_corpus import header

from wdskit import LocalShard, WdskitError
from wdskit.dataset.grouping import ShardReader
from wdskit.dataset.scan import scan_shard
from wdskit.errors import ShardError
from wdskit.tar.reader import TarReader
from wdskit.tar.writer import TarWriter

SAMPLES = {
    "a": {"jpg": b"\xff\xd8" + b"a" * 600, "json": b'{"n":1}'},
    "b": {"jpg": b"", "json": b"{}"},
    "c": {"jpg": b"c" * 512, "json": b'{"n":3}'},
}


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    return write_shard(tmp_path_factory.mktemp("damage") / "three.tar", SAMPLES)


TRUE_ITER = TarReader.__iter__


def samples_of(data: bytes):
    """The samples that come out of a stream, and its error."""
    found = {}
    reader = ShardReader(io.BytesIO(data).read, shard="three.tar")
    try:
        for sample in reader:
            found[sample["__key__"]] = {name: value for name, value in sample.items() if not name.startswith("__")}
    except ShardError as err:
        return found, err
    return found, None


def cut_everywhere(data: bytes) -> None:
    """Check every prefix of a shard but itself."""
    for size in range(len(data)):
        found, err = samples_of(data[:size])
        assert err is not None, size
        assert err.samples_read == len(found) < len(SAMPLES) + 1
        assert err.offset == size
        assert found == dict(list(SAMPLES.items())[: len(found)])


def test_a_shard_cut_at_any_byte_is_an_error_and_never_a_partial_sample(shard):
    cut_everywhere(shard.read_bytes())


def test_a_shard_cut_at_any_byte_cannot_be_indexed(shard, tmp_path):
    data = shard.read_bytes()
    path = tmp_path / "cut.tar"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(ShardError, match="stops"):
            scan_shard(str(path), name="cut.tar")


def test_random_access_to_a_cut_shard_gives_whole_samples_or_an_error(shard, tmp_path):
    from wdskit.shards.indexing import index_folder

    data = shard.read_bytes()
    path = tmp_path / "three.tar"
    path.write_bytes(data)
    index_folder(tmp_path)
    for size in range(0, len(data), 64):
        path.write_bytes(data[:size])
        with pytest.raises(WdskitError):
            LocalShard(str(path))


def test_every_single_bit_flip_is_seen_or_harmless(shard):
    """A flip in a header is an error, or changes what no reader looks at. In a payload only a digest can see it: then
    the sample keeps its key, its fields and their sizes.
    """
    data = bytearray(shard.read_bytes())
    sizes = {key: {name: len(value) for name, value in fields.items()} for key, fields in SAMPLES.items()}
    seen = 0
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        found, err = samples_of(bytes(data))
        data[bit // 8] ^= 1 << bit % 8
        seen += err is not None
        if err is None:
            assert {key: {name: len(value) for name, value in fields.items()} for key, fields in found.items()} == sizes
        else:
            assert err.samples_read == len(found)
            whole = list(sizes)[: len(found)]
            assert list(found) == whole
    num_headers = sum(map(len, SAMPLES.values()))
    assert seen >= num_headers * 512 * 8  # each of them, at least


def _takes_cuts_for_the_end(self):
    """As Python's tarfile does behind the first member."""
    try:
        yield from TRUE_ITER(self)
    except ShardError as err:
        if "stops before" not in err.problem:
            raise


def _eager(self):
    """Group as webdataset does: what has been read is a sample when the stream stops."""
    sample = {}
    try:
        for name, _, data in self._members:
            key, _, field = name.partition(".")
            if sample and sample["__key__"] != key:
                self.num_samples += 1
                yield sample
                sample = {}
            sample |= {"__key__": key, field: data}
    except ShardError as err:
        if sample:
            yield sample
        raise err.after(self.num_samples) from None
    yield sample


@pytest.mark.parametrize(
    ("owner", "mutant"), [(TarReader, _takes_cuts_for_the_end), (ShardReader, _eager)], ids=lambda x: x.__name__
)
def test_the_sweep_of_cuts_catches_a_reader_that(owner, mutant, shard, monkeypatch):
    monkeypatch.setattr(owner, "__iter__", mutant)
    with pytest.raises(AssertionError):
        cut_everywhere(shard.read_bytes())


def test_a_key_in_two_places_is_an_error_at_its_second(tmp_path):
    """Members of one key stand side by side, in one shard; other shards are others' keys."""
    buffer = io.BytesIO()
    writer = TarWriter(buffer.write)
    for name in ("a.jpg", "b.jpg", "a.json"):
        writer.add(name, b"x")
    writer.finish()
    found, err = samples_of(buffer.getvalue())
    assert list(found) == ["a", "b"]
    assert (err.offset, err.samples_read) == (2048, 2)
    assert "'a' stands in two places" in err.problem


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["a.jpg", "a.jpg"], "'jpg': twice"),
        (["a.jpg", "a.JPG"], "'jpg': twice"),
        (["a.__key__"], "'__key__': a name that readers keep for themselves"),
        (["a.jpg", "a.__url__"], "'__url__'"),
    ],
)
def test_fields_that_would_overwrite_each_other_are_errors(names, problem):
    buffer = io.BytesIO()
    writer = TarWriter(buffer.write)
    for name in names:
        writer.add(name, b"x")
    writer.finish()
    found, err = samples_of(buffer.getvalue())
    assert found == {}
    assert problem in err.problem


def test_a_header_that_promises_the_world_costs_nothing(tmp_path):
    """No memory is taken for bytes that have not come, in a stream or in a file."""
    data = header(b"a.bin", b"77777777777\x00") + bytes(5000)
    path = tmp_path / "promise.tar"
    path.write_bytes(data)
    tracemalloc.start()
    found, err = samples_of(data)
    with pytest.raises(ShardError, match="stops inside a member"):
        scan_shard(str(path), name="promise.tar")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found, err.offset) == ({}, 5512)
    assert peak < 40 << 20


NAMES = st.from_regex(r"\A[a-z0-9_-]{1,8}(/[a-z0-9_-]{1,8}){0,2}\.[a-z]{1,5}(\.[a-z]{1,5})?\Z")
MEMBERS = st.lists(st.tuples(NAMES, st.binary(max_size=1600)), max_size=8)


@given(members=MEMBERS, sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_what_the_writer_writes_both_readers_read(members, sizes):
    buffer = io.BytesIO()
    writer = TarWriter(buffer.write)
    for name, data in members:
        writer.add(name, data)
    writer.finish()
    assert writer.offset == len(buffer.getvalue())
    turns = iter(sizes * 10_000)
    buffer.seek(0)
    assert [
        (name, data) for name, _, data in TarReader(lambda n: buffer.read(min(n, next(turns))), shard="x")
    ] == members
    with tarfile.open(fileobj=io.BytesIO(buffer.getvalue()), mode="r:") as archive:
        assert [(info.name, archive.extractfile(info).read()) for info in archive] == members


@given(
    members=MEMBERS,
    format_=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    mtime=st.one_of(st.integers(0, 2**33), st.floats(0, 2**33)),
    deep=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_what_tarfile_writes_is_read(members, format_, mtime, deep):
    """Its three formats, float times, names of 130 bytes."""
    members = [("x" * 60 + "/" + "y" * 60 + "/" + name if deep else name, data) for name, data in members]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format_) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), mtime
            archive.addfile(info, io.BytesIO(data))
    buffer.seek(0)
    assert [(name, data) for name, _, data in TarReader(buffer.read, shard="x")] == members


@given(data=st.data(), members=MEMBERS.filter(bool))
@settings(max_examples=300, deadline=None)
def test_mutilated_shards_give_shard_errors_and_nothing_else(data, members):
    """Bytes overwritten, cut out and put in: members or a `ShardError`, and every member a stretch of the shard."""
    buffer = io.BytesIO()
    writer = TarWriter(buffer.write)
    for name, content in members:
        writer.add(name, content)
    writer.finish()
    shard = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(shard)))
        stop = at + data.draw(st.sampled_from([0, 1, 8, 512, 1024]))
        shard[at:stop] = data.draw(st.one_of(st.binary(max_size=16), st.sampled_from([bytes(512), bytes(1024)])))
    offset = 0
    try:
        for _, start, content in TarReader(io.BytesIO(shard).read, shard="x"):
            assert content in shard[start:]
    except ShardError as err:
        offset = err.offset
    assert 0 <= offset <= len(shard)


@given(st.binary(max_size=2000))
@settings(max_examples=200, deadline=None)
def test_garbage_is_a_shard_error(data):
    with pytest.raises(ShardError):
        list(ShardReader(io.BytesIO(data).read, shard="x"))
