"""The strict reader on damaged, hostile and random bytes: it accepts only archives that all programs read in the same
way, the rest is a `ShardError`, and neither costs more memory than the received bytes.

Single archives are tested in `test_corpus.py`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import tarfile
from collections import Counter
from typing import Any

import pytest
from folders import ALL
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tar_corpus import CASES, END, GNU, file_of, member, pax, record

from wdskit.dataset.samples import ShardReader
from wdskit.errors import ShardError
from wdskit.tar import reader as reader_module
from wdskit.tar import window as window_module
from wdskit.tar.names import split_name
from wdskit.tar.reader import TarReader, locate_members
from wdskit.tar.walk import TarWalk
from wdskit.tar.window import LargeData

Samples = list[tuple[str, dict[str, bytes]]]

SAMPLES: Samples = [
    ("a", {"jpg": b"\xff\xd8 image", "json": b"{}"}),
    ("b", {"jpg": b""}),
    ("c", {"jpg": b"c" * 512, "json": b"1"}),
]
SHARD = b"".join(member(f"{key}.{name}", data) for key, fields in SAMPLES for name, data in fields.items()) + END


def samples_of(read) -> tuple[Samples, ShardError | None]:
    """Return the samples, and the error after them or None."""
    found = []
    reader = ShardReader(read, shard="a.tar")
    try:
        for sample in reader:
            found.append((sample.pop("__key__"), sample))
            assert sample.pop("__url__") == "a.tar"
    except ShardError as err:
        return found, err
    return found, None


# Changed bits.


def parts_of(shard: bytes) -> list[tuple[str, int, int, int]]:
    """Return the parts of a shard by Python's tarfile: (kind, start, stop, samples before that are known to be whole).

    A sample is known to be whole when a header of the next key, or the end marker, has been read.
    """
    parts = []
    keys: list[str] = []
    with tarfile.open(fileobj=io.BytesIO(shard), mode="r:") as archive:
        members = archive.getmembers()
    for info in members:
        key = info.name.split(".")[0]
        is_first = key not in keys
        whole = max(0, len(keys) - 1) if is_first else len(keys) - 1
        keys += [key] if is_first else []
        end = info.offset_data + info.size
        parts.append(("header", info.offset, info.offset_data, whole))
        parts.append(("data", info.offset_data, end, len(SAMPLES)))
        parts.append(("padding", end, end + -info.size % 512, len(SAMPLES)))
    stop = parts[-1][2]
    return [*parts, ("end", stop, len(shard), len(keys) - 1)]


PARTS = parts_of(SHARD)


def checksum_number(data: bytearray, start: int) -> int | None:
    """Return the number in the checksum field of the header at `start`, by POSIX's rule."""
    match = re.fullmatch(rb" *([0-7]+)[ \x00]*", data[start + 148 : start + 156])
    return int(match[1], 8) if match else None


def check_flips(bits: range | None = None) -> Counter[str]:
    """Change each bit in turn, or one bit of each byte, and check the result; return the number of each kind."""
    data = bytearray(SHARD)
    counts: Counter[str] = Counter()
    for kind, start, stop, whole in PARTS:
        number = checksum_number(data, start) if kind == "header" else None
        for at in range(start, stop):
            for bit in bits or (at % 8,):
                data[at] ^= 1 << bit
                found, err = samples_of(io.BytesIO(data).read)
                same_number = kind == "header" and 148 <= at - start < 156 and checksum_number(data, start) == number
                data[at] ^= 1 << bit
                if kind == "padding" or same_number:  # no reader uses it; a space in place of a zero before a number
                    assert (found, err) == (SAMPLES, None)
                    counts["harmless"] += 1
                elif kind == "data":  # only that byte of that field differs: only a digest can show it
                    assert err is None
                    assert [(key, list(fields)) for key, fields in found] == [(k, list(f)) for k, f in SAMPLES]
                    before, after = (b"".join(d for _, f in s for d in f.values()) for s in (SAMPLES, found))
                    assert [a ^ b for a, b in zip(before, after, strict=True) if a != b] == [1 << bit]
                    counts["data"] += 1
                else:  # an error at the damage, after the whole samples before it
                    assert err is not None, (kind, at, bit)
                    assert (err.offset, err.samples_read, found) == (start, whole, SAMPLES[:whole])
                    counts["error"] += 1
    return counts


def test_every_bit_of_a_header_and_the_end_marker_is_watched():
    """A changed bit there is an error at that place, after the samples before it, unless the checksum's number is the
    same: its first zero as a space, its end as a space or NUL. In a payload the bit changes only that byte of that
    field, which a digest shows. In the padding it changes nothing.
    """
    contents = [data for _, fields in SAMPLES for data in fields.values()]
    harmless = 3 * len(contents)
    assert check_flips(range(8)) == {
        "error": 8 * (512 * len(contents) + 1024) - harmless,
        "data": 8 * sum(map(len, contents)),
        "harmless": 8 * sum(-len(data) % 512 for data in contents) + harmless,
    }


# Missing bytes.


def whole_before(size: int) -> int:
    """Return the number of samples known to be whole in the first `size` bytes: the next key's header, its data, and
    the bytes that show the end of the data are there.
    """
    ends = [stop for kind, _, stop, _ in PARTS if kind == "padding"]
    keys = [key for key, fields in SAMPLES for _ in fields]
    seen = {key for key, end in zip(keys, ends, strict=True) if size >= end}
    return max(0, len(seen) - 1)


def check_cuts(read_of=lambda data: io.BytesIO(data).read) -> None:
    """Cut the shard at every byte, and check: an error at the cut, only whole samples before it."""
    for size in range(len(SHARD)):
        found, err = samples_of(read_of(SHARD[:size]))
        assert err is not None, size
        assert "stops" in err.problem
        assert err.offset == size
        assert (found, err.samples_read) == (SAMPLES[: whole_before(size)], whole_before(size))


def in_steps(data: bytes, sizes: list[int]):
    """Return a read function that returns at most `sizes` bytes in turn, repeated for ever."""
    stream, turns = io.BytesIO(data), itertools.cycle(sizes)
    return lambda size: stream.read(min(size, next(turns)))


@pytest.mark.parametrize("sizes", [[10_000], [511], [512], [100, 700]], ids=str)
def test_a_cut_at_any_byte_is_told_at_that_byte_whatever_the_reads(sizes):
    check_cuts(lambda data: in_steps(data, sizes))


@pytest.mark.parametrize("large", [0, 1, 512])
def test_a_cut_at_any_byte_is_told_for_large_members_too(large, monkeypatch):
    """Members of this size and more are read separately, and the headers after them one by one."""
    monkeypatch.setattr(window_module, "LARGE_BYTES", large)
    monkeypatch.setattr(window_module, "CHUNK_BYTES", 512)
    check_cuts()


def test_a_reader_that_ignores_what_follows_the_end_is_caught(monkeypatch):
    """The mutants of `test_corpus.py` show the same of every other check of the reader."""
    monkeypatch.setattr(reader_module, "check_end", lambda window: None)
    for sweep in (check_flips, check_cuts):
        with pytest.raises(AssertionError):
            sweep()


def test_a_pax_header_full_of_records_is_read_in_one_pass():
    """150,000 records are the most that fit: each byte is read only a few times, for any number of records."""
    body = record(b"a", b"") * 150_000
    data = pax(body) + member("a.txt", b"x") + END
    assert list(TarReader(io.BytesIO(data).read, shard="x")) == [("a.txt", 0, b"x")]


def test_nothing_is_asked_of_a_stream_behind_its_end():
    """A read from a pipe or a socket would hang."""
    for case in CASES:
        stream, ends = io.BytesIO(case.data), 0

        def read(size: int, stream=stream) -> bytes:
            nonlocal ends
            part = stream.read(size)
            ends += not part
            return part

        with contextlib.suppress(ShardError):
            list(TarReader(read, shard="x"))
        assert ends <= 2, case  # some faults show only at the end of the stream


def test_zeros_after_the_end_marker_are_bounded(monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_END_ZEROS_BYTES", 5000)
    for size in (0, 512, 5000):
        assert samples_of(io.BytesIO(SHARD + bytes(size)).read) == (SAMPLES, None)
    endless = itertools.chain([SHARD], itertools.repeat(bytes(1000)))
    for read in (io.BytesIO(SHARD + bytes(5001)).read, lambda size: next(endless)):
        found, err = samples_of(read)
        assert found == SAMPLES[:-1]
        assert err is not None
        assert "more than 5000 zeros follow the end marker" in str(err)
    with pytest.raises(ShardError, match="more than 5000 zeros"):
        list(TarWalk(_read_at(SHARD + bytes(9000)), len(SHARD) + 9000, shard="x"))


def _read_at(data: bytes) -> Any:
    return lambda offset, size: data[offset : offset + size]


# Random access.


@pytest.mark.parametrize("behind", [0, 512, 1024])
def test_a_part_of_a_shard_that_does_not_end_between_members_is_an_error(behind):
    """`locate_members` runs on every block-aligned part, with some bytes after it: whole members, or an error."""
    edges = {start for kind, start, *_ in PARTS if kind in {"header", "end"}}
    for first in range(0, len(SHARD) - 1024, 512):
        for stop in range(first + 512, len(SHARD), 512):
            part = SHARD[first : stop + behind]
            try:
                found = [
                    (name, part[at:end])
                    for name, at, end in locate_members(part, shard="x", offset=first, stop=stop - first)
                ]
            except ShardError as err:
                offset = err.offset
                assert not {first, stop} <= edges
            else:
                offset = stop
                assert {first, stop} <= edges
                assert b"".join(member(*each) for each in found) == SHARD[first:stop]
            assert first <= offset <= stop


# Random bytes.


def outcome(read) -> tuple[list[tuple[str, int, bytes]], str]:
    """Return the members and the error's text."""
    members: list[tuple[str, int, bytes]] = []
    try:
        for each in TarReader(read, shard="x"):
            members += [each]
    except ShardError as err:
        return members, str(err)
    return members, ""


def is_folder(info: tarfile.TarInfo) -> bool:
    """Return whether a member is an empty file, but no sparse one, whose name ends in a slash: a folder for readers."""
    is_plain = info.isreg() and info.type != tarfile.GNUTYPE_SPARSE and not info.size
    return is_plain and (info.name.endswith("/") or info.pax_headers.get("path", "").endswith("/"))


def compare_with_tarfile(data: bytes) -> None:
    members, error = outcome(io.BytesIO(data).read)
    if error:
        return
    files = []
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            while (info := archive.next()) is not None:
                if not info.isdir() and not is_folder(info):
                    files.append(file_of(archive, info))
    except tarfile.ReadError as err:
        if str(err) != "end of file header":  # of a global header at the end, which `git archive` writes without files
            raise

    def compared(name: str, content: bytes) -> tuple[str, bytes]:
        """A sparse file without a key is read as it stands; tarfile leaves out a prefix, which its format lacks."""
        return (name.rstrip("/"), content) if split_name(name.rstrip("/")) else ("", b"")

    assert [compared(name, content) for name, _, content in members] == [compared(*file) for file in files]


LETTERS = "ab/._ \u00e4\u4e2d\U0001f600\u0301\n"
LONG_NAMES = st.builds(
    lambda part, count, end: part * count + end,
    st.text(LETTERS, min_size=1, max_size=6),
    st.sampled_from([1, 1, 17, 60]),
    st.sampled_from([".jpg", ".seg.png", "", "/", "\udcff"]),
)
KINDS = [tarfile.REGTYPE] * 12 + [tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.DIRTYPE] * 2
KINDS += [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]


@st.composite
def written_by_tarfile(draw) -> bytes:
    """Draw an archive of Python's tarfile in one of its formats: names of any length and script, folders, links."""
    names = draw(st.lists(LONG_NAMES, min_size=1, max_size=4))
    out = io.BytesIO()
    kind = draw(st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT]))
    with tarfile.open(fileobj=out, mode="w", format=kind, errors="surrogateescape") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.type = draw(st.sampled_from(KINDS))
            info.mtime = draw(st.sampled_from([0, 1.5, 1 << 34]))
            info.linkname = "a" if info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            info.pax_headers = draw(st.sampled_from([{}, {}, {"comment": "\u00e4\nb=c"}, {"path": "p.txt"}]))
            data = draw(st.binary(max_size=3)) * draw(st.sampled_from([1, 400]))
            info.size = len(data) if info.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE) else 0
            with contextlib.suppress(ValueError):  # the format cannot store it
                archive.addfile(info, io.BytesIO(data))
        end = archive.offset
    return out.getvalue()[:end] + END


USED_BYTES = [*range(100), *range(124, 136), *range(148, 329), *range(345, 512)]
"""Offsets in a header without mode, owner, time and device: wdskit's reader ignores these numbers."""


@st.composite
def changed_in_place(draw) -> bytes:
    """Draw an archive of tarfile with changes; some changed headers get a right checksum."""
    data = bytearray(draw(written_by_tarfile()))
    for _ in range(draw(st.integers(0, 3))):
        block = 512 * draw(st.integers(0, len(data) // 512 - 1))
        how = draw(st.sampled_from(["header", "header", "header", "byte", "remove", "repeat", "exchange", "cut"]))
        if how == "header" and not data[block + 100 : block + 124].strip(b"01234567 \x00"):  # no data, no name
            is_gnu = data[block + 257 : block + 265] == GNU  # others read a prefix, which the format lacks
            places = [(0, 100), (124, 12), (124, 12), (156, 1), (156, 1), (257, 8)] + [(345, 155)] * (not is_gnu)
            first, size = draw(st.sampled_from(places))
            at = block + first + draw(st.integers(0, size - 1))
            data[at : at + 1] = draw(
                st.one_of(
                    st.sampled_from(
                        [b"\x00", b"0", b"1", b"5", b"7", b"L", b"x", b"g", b"S", b"K", b" ", b"\x80", b"/", b"."]
                    ),
                    st.binary(min_size=1, max_size=1),
                )
            )
            whole = data[block : block + 148] + b" " * 8 + data[block + 156 : block + 512]
            data[block + 148 : block + 156] = b"%06o\x00 " % sum(whole)
        elif how == "byte":
            data[block + draw(st.sampled_from(USED_BYTES))] = draw(st.integers(0, 255))
        elif how == "remove":
            del data[block : block + 512]
        elif how == "repeat":
            data[block:block] = data[block : block + 512]
        elif how == "exchange":
            other = 512 * draw(st.integers(0, len(data) // 512 - 1))
            data[block : block + 512], data[other : other + 512] = data[other : other + 512], data[block : block + 512]
        else:
            del data[block + draw(st.integers(0, 511)) :]
        if len(data) < 512:
            break
    return bytes(data)


@given(changed_in_place())
@example(member("\x01/", b"", kind=b"S") + END)
@settings(max_examples=20_000 if ALL else 300)
def test_a_changed_archive_of_tarfile_is_read_as_tarfile_reads_it_or_is_an_error(data):
    compare_with_tarfile(data)
    walked, error = [], ""
    try:
        for each in TarWalk(lambda at, size: data[at : at + size], len(data), shard="x"):
            walked += [each]
    except ShardError as err:
        error = str(err)
    read, read_error = outcome(io.BytesIO(data).read)
    assert error == read_error
    assert [(name, start, data[span.offset : span.offset + span.size]) for name, start, span in walked] == read


# Skipped members.


@pytest.mark.parametrize("hold_bytes", [1 << 19, 1 << 20, 3 << 20])
@pytest.mark.parametrize("change", [-1, 0, 1])
def test_a_member_over_the_limit_is_read_and_not_kept(hold_bytes, change):
    """Other members are the same as without a limit, and a cut or damage in the large member is found too."""
    data = member("a.cls", b"1") + member("b.bin", bytes(hold_bytes + change)) + member("c.cls", b"3") + END
    found = list(TarReader(io.BytesIO(data).read, shard="x.tar", hold_bytes=hold_bytes))
    whole = list(TarReader(io.BytesIO(data).read, shard="x.tar"))
    assert [found[0], found[2]] == [whole[0], whole[2]]
    if change > 0:
        assert isinstance(found[1][2], LargeData)
        assert (len(found[1][2]), found[1][2].num_bytes, found[1][:2]) == (0, hold_bytes + 1, whole[1][:2])
    else:
        assert found == whole
    for cut in (2000, hold_bytes, len(data) - 2048, len(data) - 1):
        with pytest.raises(ShardError) as caught:
            list(TarReader(io.BytesIO(data[:cut]).read, shard="x.tar", hold_bytes=hold_bytes))
        assert caught.value.offset == cut
