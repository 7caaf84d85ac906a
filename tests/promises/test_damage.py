"""A damaged file is an error or gives the samples that were written: nothing cut short or mixed up becomes a sample.

Shards are cut at each length and changed byte by byte, then read in every public way. Damage inside a payload is found
by the sha256 in the index: `verify`, or `check: sha256`. WDSKIT_ALL=1 tries each cut and flip, otherwise a part.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import tarfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from disks import HastyDisk, KillingDisk, WatchedDisk, on, run_child
from folders import ALL
from formats import WORK_FOLDER, files_in, read_folder, tar_bytes, write_tar
from writing import pack

import wdskit
from wdskit import LocalShard, Pipeline, WdskitError, verify

Sample = tuple[str, dict[str, bytes]]
Found = list[Sample]


def rows() -> list[dict[str, Any]]:
    return [{"__key__": f"k{n}", "bin": bytes([n]) * 600, "cls": n, "json": {"n": n}, "txt": f"t{n}"} for n in range(4)]


# Ways to read, each with public names only. A way yields what it has before it raises.


def by_number(shard: Path) -> Iterator[Sample]:
    with LocalShard(shard) as opened:
        for number in range(len(opened)):
            key, fields = opened.read(number)
            yield key, {name: bytes(data) for name, data in fields.items()}


def _of(source: Callable[[str], Pipeline]) -> Callable[[Path], Iterator[Sample]]:
    def read(shard: Path) -> Iterator[Sample]:
        for sample in source(str(shard)).loader(workers=0):
            yield sample["__key__"], {name: bytes(data) for name, data in sample.items() if not name.startswith("__")}

    return read


def verified(shard: Path) -> Iterator[Sample]:
    """`verify` finds damage, and the samples of a clean shard are those that `tarfile` reads."""
    result = verify(shard.parent, workers=1)
    if not result.is_clean:
        raise WdskitError(str(result.findings[0]))
    yield from read_folder(shard.parent).items()


WAYS: dict[str, Callable[[Path], Iterator[Sample]]] = {
    "LocalShard": by_number,
    "stream": _of(lambda shard: Pipeline().stream(shard)),
    "sequential": _of(lambda shard: Pipeline().sequential(shard)),
    "exact": _of(lambda shard: Pipeline().exact(shard, window=1, lanes=1)),
    "verify": verified,
    "stream with sha256": _of(lambda shard: Pipeline().stream(shard, check="sha256")),
}
CHECKS_BYTES = ("verify", "stream with sha256")


class Shard:
    """A packed folder with one shard, which is damaged and mended in place; its times stay."""

    def __init__(self, folder: Path) -> None:
        pack(rows(), folder)
        self.path = folder / f"{folder.name}-000000.tar"
        self.data = self.path.read_bytes()
        self.samples: Found = [*read_folder(folder).items()]
        self._times = self.path.stat()

    def write(self, data: bytes) -> None:
        self.path.write_bytes(data)
        os.utime(self.path, ns=(self._times.st_atime_ns, self._times.st_mtime_ns))

    def read(self, way: str) -> tuple[Found, str | None]:
        """Return the samples before an error, and its message."""
        found: Found = []
        try:
            found.extend(WAYS[way](self.path))
        except WdskitError as err:
            return found, str(err)
        return found, None


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path / "d")


def draw(places: Iterable[int], num: int, name: str) -> list[int]:
    """Return all places, or by default a sample of them."""
    listed = [*places]
    return listed if ALL else sorted(random.Random(name).sample(listed, min(num, len(listed))))


@pytest.mark.parametrize("way", WAYS)
def test_cut_shard_is_an_error_after_whole_samples_only(shard: Shard, way: str) -> None:
    assert sorted(shard.read(way)[0]) == sorted(shard.samples)
    edges = [edge + near for edge in range(0, len(shard.data), 512) for near in (-1, 0, 1)]
    cuts = {0, len(shard.data) - 1, *draw(range(len(shard.data)), 12, way), *draw(filter(None, edges), 16, f"{way}-")}
    for cut in sorted(cuts - {-1}):
        shard.write(shard.data[:cut])
        found, message = shard.read(way)
        assert message is not None, cut
        assert shard.path.name in message
        assert all(sample in shard.samples for sample in found), cut


@pytest.mark.parametrize("way", WAYS)
def test_flipped_header_or_end_marker_is_an_error_or_the_right_samples(shard: Shard, way: str) -> None:
    with tarfile.open(shard.path) as archive:
        infos = archive.getmembers()
    places = [at for info in infos for at in range(info.offset, info.offset + 512)]
    places += range(infos[-1].offset_data + 512, len(shard.data))
    num_errors = 0
    for at in draw(places, 60, way):
        flipped = bytearray(shard.data)
        flipped[at] ^= 1 << at % 8
        shard.write(bytes(flipped))
        found, message = shard.read(way)
        if message is None:
            assert sorted(found) == sorted(shard.samples), at
        else:
            num_errors += 1
            assert all(sample in shard.samples for sample in found), at
    assert num_errors > 40


@pytest.mark.parametrize("way", CHECKS_BYTES)
def test_flipped_payload_is_found_by_the_digest(shard: Shard, way: str) -> None:
    with tarfile.open(shard.path) as archive:
        places = [at for info in archive for at in range(info.offset_data, info.offset_data + info.size)]
    for at in draw(places, 30, way):
        flipped = bytearray(shard.data)
        flipped[at] ^= 1 << at % 8
        shard.write(bytes(flipped))
        found, message = shard.read(way)
        assert message is not None, at
        assert all(sample in shard.samples for sample in found), at


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
@pytest.mark.parametrize("folder", ["f" * 90, "g" * 60 + "/" + "h" * 60], ids=["name", "deep"])
def test_flipped_long_name_loses_and_invents_no_payload(tmp_path: Path, form: int, folder: str) -> None:
    """No checksum covers a name over 100 bytes: only a digest shows the flip, else a sample may get another key."""
    samples = {f"{folder}/{n}": {"bin": bytes([n]) * 3, "cls": b"%d" % n} for n in range(3)}
    path = write_tar(tmp_path / "d" / "s.tar", samples, form=form)
    data, times = path.read_bytes(), path.stat()
    wdskit.index_folder(tmp_path / "d", workers=1)
    with tarfile.open(path) as archive:
        places = [at for info in archive for at in range(info.offset, info.offset_data)]
    num_errors = 0
    for at in draw(places, 30, f"{form} {folder}"):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert not verify(tmp_path / "d", workers=1).is_clean, at
        for way in ("stream", "exact", "LocalShard"):
            found: Found = []
            try:
                found.extend(WAYS[way](path))
            except WdskitError:
                num_errors += 1
            payloads = [payload for _, fields in found for payload in fields.values()]
            assert len({*payloads}) == len(payloads), (way, at)
            assert {*payloads} <= {payload for fields in samples.values() for payload in fields.values()}, (way, at)
    assert num_errors > 30


@pytest.mark.parametrize("way", ["LocalShard", "stream", "sequential", "exact"])
def test_flipped_payload_changes_no_key_and_no_other_sample(shard: Shard, way: str) -> None:
    at = shard.data.index(b"\2" * 600) + 30
    shard.write(shard.data[:at] + b"x" + shard.data[at + 1 :])
    found, _ = shard.read(way)
    assert [key for key, _ in found] == [key for key, _ in shard.samples]
    assert sum(sample not in shard.samples for sample in found) <= 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "change", ["swapped samples", "another shard", "regrouped", "bytes after the end", "second archive"]
)
def test_shard_that_is_not_the_indexed_one_is_an_error(shard: Shard, way: str, change: str) -> None:
    samples = dict(shard.samples)
    swapped = {key: samples[key] for key in reversed(samples)}
    others = {key: {**fields, "bin": bytes(600)} for key, fields in samples.items()}
    halves = [{"bin", "cls"}, {"json", "txt"}]  # each sample as two of half its fields, in the same bytes
    regrouped = {
        f"{prefix}{key[1:]}": {name: data for name, data in fields.items() if name in half}
        for key, fields in samples.items()
        for prefix, half in zip("kx", halves, strict=True)
    }
    changed = {
        "swapped samples": tar_bytes(swapped),
        "another shard": tar_bytes({**others, "k9": {"txt": b"x"}}),
        "regrouped": tar_bytes(regrouped),
        "bytes after the end": shard.data + b"x" * 512,
        "second archive": shard.data + shard.data,
    }[change]
    shard.write(changed)
    found, message = shard.read(way)
    if change == "regrouped":  # a stream reads what is there: whole samples of the other shard
        assert message is not None or (way, sorted(found)) == ("stream", sorted(regrouped.items()))
        return
    is_seen = change == "another shard" or (change != "swapped samples" and way != "LocalShard")
    if is_seen or way in CHECKS_BYTES:
        assert message is not None
    if message is None:
        assert sorted(found) == sorted(shard.samples)


# Files beside the shards.


def damages(data: bytes, num: int) -> Iterator[tuple[str, bytes]]:
    """Yield cuts and flips of a file."""
    for cut in draw(range(len(data)), num, "cut"):
        yield f"cut at {cut}", data[:cut]
    for at in draw(range(len(data)), num, "flip"):
        yield f"flip at {at}", data[:at] + bytes([data[at] ^ 1 << at % 7]) + data[at + 1 :]


def readings(folder: Path) -> tuple[Found, str | None]:
    """Read all samples of a folder; `exact` needs the index. What `verify` calls clean is right for `formats`, too."""
    with contextlib.suppress(WdskitError, KeyError):
        if verify(folder, workers=1).is_clean:  # also if a name that only other readers need is damaged
            read_folder(folder)
    found: Found = []
    try:
        found.extend(_of(lambda url: Pipeline().exact(url, window=1, lanes=1))(folder))
    except WdskitError as err:
        return found, str(err)
    return found, None


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder of two shards with classes."""
    named = [{**row, "cls": "ab"[at % 2]} for at, row in enumerate(rows())]
    pack(named, tmp_path / "d", max_samples=2, classes=["a", "b"])
    return tmp_path / "d"


@pytest.mark.parametrize("name", ["index.json", "d-000000.tar.idx"])
def test_damaged_index_is_an_error_that_names_the_file_or_the_right_samples(two: Path, name: str) -> None:
    whole = sorted(read_folder(two).items())
    data = (two / name).read_bytes()
    num_errors = 0
    for what, damaged in damages(data, 60):
        (two / name).write_bytes(damaged)
        found, message = readings(two)
        if message is None:
            assert sorted(found) == whole, what
        else:
            num_errors += 1
            assert all(sample in whole for sample in found), what
            assert name in message or "index" in message or re.search(r"d-[^ ]*tar", message), (what, message)
        (two / name).write_bytes(data)
    assert num_errors > 40
    assert sorted(readings(two)[0]) == whole


FOREIGN = {
    "empty": b"",
    "no JSON": b"index",
    "list": b"[]",
    "other JSON": b'{"shards": []}',
    "package.json": b'{"name": "x", "version": "1.0.0"}',
    "deep": b"[" * 100_000,
    "not UTF-8": b'{"__kind__": "\xff"}',
}


@pytest.mark.parametrize("kind", [*FOREIGN, "newer"])
def test_foreign_or_newer_index_is_an_error_that_names_the_file(two: Path, kind: str) -> None:
    """For readers, `verify` and `pack --append`; nothing is changed."""
    newer = (two / "index.json").read_bytes().replace(b'"wdskit_index_version": 1', b'"wdskit_index_version": 99')
    (two / "index.json").write_bytes(FOREIGN.get(kind, newer))
    _, message = readings(two)
    before = files_in(two)
    assert message is not None
    assert "index.json" in message
    assert kind != "newer" or "99" in message
    for call in (lambda: verify(two), lambda: pack([{"__key__": "n", "txt": "x"}], two, append=True)):
        try:
            result = call()
            assert not result.is_clean
        except WdskitError as err:
            assert "index.json" in str(err)  # noqa: PT017 (verify lists findings or raises)
    assert files_in(two) == before


def test_shard_that_index_json_lists_and_that_is_gone_is_an_error_that_names_it(two: Path) -> None:
    (two / "d-000001.tar").unlink()
    _, message = readings(two)
    assert "d-000001.tar" in str(message)
    assert not verify(two).is_clean


def test_tar_that_index_json_does_not_list_is_no_data(two: Path) -> None:
    whole = sorted(read_folder(two).items())
    write_tar(two / "d-000002.tar", {"other": {"txt": b"x", "cls": b"0", "bin": b"", "json": b"{}"}})
    assert sorted(readings(two)[0]) == whole
    pack([{"__key__": "n", "txt": "x"}], two.parent / "e")
    assert wdskit.info(str(two)).num_samples == len(whole)


@pytest.mark.parametrize("kind", [*FOREIGN, "number missing"])
def test_damaged_classes_json_is_an_error_that_names_it(two: Path, kind: str) -> None:
    (two / "classes.json").write_bytes(FOREIGN.get(kind, b'{"a": 0, "b": 2}'))
    before = files_in(two)
    with pytest.raises(WdskitError, match=r"classes\.json"):
        pack([{"__key__": "n", "txt": "x", "cls": "a"}], two, append=True, classes=two)
    assert files_in(two) == before
    assert not verify(two).is_clean


@pytest.mark.parametrize("column", ["json.n", "txt"])
def test_damaged_column_is_an_error_that_names_it(tmp_path: Path, column: str) -> None:
    """Also for `wdskit.columns`, which looks at no sample."""
    pack(rows(), tmp_path / "d", columns=[column])
    [npy] = (tmp_path / "d").glob(f"{column}.*.npy")
    values = list(cast("Iterable[Any]", wdskit.columns(tmp_path / "d")[column]))
    for path in (npy, tmp_path / "d" / "columns.json"):
        data = path.read_bytes()
        for what, damaged in damages(data, 25):
            path.write_bytes(damaged)
            try:
                assert list(cast("Iterable[Any]", wdskit.columns(tmp_path / "d")[column])) == values, what
            except WdskitError as err:
                place = rf"^{tmp_path}/d(: column {column}|/columns.json): "
                assert re.match(place, str(err))  # noqa: PT017 (or the right values)
        path.write_bytes(data)


# What a killed run left in .wdskit.


def stopped(folder: Path, number: int) -> None:
    """Pack with a disk that kills the process at an operation."""
    work: Callable[[], Any] = lambda: on(KillingDisk(number), pack, rows(), folder, max_samples=1)  # noqa: E731
    assert run_child(work) == -signal.SIGKILL


@pytest.mark.parametrize("part", [0.4, 0.6, 0.7, 0.8, 0.9])
def test_damaged_file_of_a_killed_run_is_not_read_into_a_shard(tmp_path: Path, part: float) -> None:
    """Each file in .wdskit is damaged in turn. The same call fills the shard again, or names the file: then the call
    works without that file.
    """
    watched = WatchedDisk()
    on(watched, pack, rows(), tmp_path / "whole" / "d", max_samples=1)
    whole = files_in(tmp_path / "whole" / "d")
    number = int(len(watched.operations) * part)
    stopped(tmp_path / "stopped" / "d", number)
    left = sorted(
        path.relative_to(tmp_path / "stopped") for path in (tmp_path / "stopped" / "d" / WORK_FOLDER).rglob("*")
    )
    notes = [path for path in left if path.suffix == ".json"]
    assert notes
    for path in left:
        original = (tmp_path / "stopped" / path).read_bytes()
        cases = [("cut", original[: len(original) // 2]), ("empty", b"")]
        if path in notes:
            cases += [*damages(original, 8), *FOREIGN.items()]
        for what, damaged in cases:
            dest = tmp_path / "out" / "d"
            shutil.copytree(tmp_path / "stopped", dest.parent)
            (dest.parent / path).write_bytes(damaged)
            try:
                on(HastyDisk(), pack, rows(), dest, max_samples=1)
            except WdskitError as err:
                assert path.name in str(err) or f"Remove {dest}" in str(err), (path, what)  # noqa: PT017
                if path.name in str(err):
                    (dest.parent / path).unlink()
                else:  # the stopped run had begun to give the files their names
                    assert not (dest / "index.json").exists()
                    shutil.rmtree(dest)
                on(HastyDisk(), pack, rows(), dest, max_samples=1)
            assert files_in(dest) == whole, (path, what)
            shutil.rmtree(dest.parent)


def test_entry_of_another_run_is_not_used(tmp_path: Path) -> None:
    """An entry file of a run with other rows, copied over the right one, does not make its shard done."""
    others = [{**row, "txt": "other"} for row in rows()]
    watched = WatchedDisk()
    on(watched, pack, rows(), tmp_path / "whole" / "d", max_samples=1)
    number = len(watched.operations) * 2 // 3
    for name, source in (("right", rows()), ("other", others)):
        work = partial(on, KillingDisk(number), pack, source, tmp_path / name / "d", max_samples=1)
        assert run_child(work) == -signal.SIGKILL
    shutil.copytree(tmp_path / "other" / "d" / WORK_FOLDER, tmp_path / "right" / "d" / WORK_FOLDER, dirs_exist_ok=True)
    pack(rows(), tmp_path / "right" / "d", max_samples=1)
    assert files_in(tmp_path / "right" / "d") == files_in(tmp_path / "whole" / "d")


# Tars of other programs: sound ones are read, unusual members cost only themselves.


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("way", ["stream", "pack"])
def test_long_and_odd_names_of_other_programs_are_read(tmp_path: Path, form: int, way: str) -> None:
    samples = {f"{'f' * 60}/{n}": {"txt": b"x" * n, "cls": b"1"} for n in range(3)}
    samples |= {f"{'g' * 60}/{'h' * 60}/{n}": {"txt": b"", "cls": b"2"} for n in range(2)}
    write_tar(tmp_path / "in.tar", samples, form=form)
    if way == "stream":
        assert dict(WAYS["stream"](tmp_path / "in.tar")) == samples
    else:
        pack(tmp_path / "in.tar", tmp_path / "d", keys="hashed")
        assert [f["txt"] for f in read_folder(tmp_path / "d").values()] == [f["txt"] for f in samples.values()]


def test_dot_slash_before_a_name_changes_no_key(tmp_path: Path) -> None:
    """`./a.txt` beside `a.cls` is one sample, for each reader."""
    (tmp_path / "in").mkdir()
    data = tar_bytes({"./a": {"txt": b"x"}})[:1024] + tar_bytes(
        {"a": {"cls": b"1"}, "././b": {"cls": b"2", "txt": b"y"}}
    )
    (tmp_path / "in" / "in.tar").write_bytes(data)
    expected = {"a": {"txt": b"x", "cls": b"1"}, "b": {"cls": b"2", "txt": b"y"}}
    pack(tmp_path / "in" / "in.tar", tmp_path / "d")
    assert read_folder(tmp_path / "d") == {key: dict(sorted(fields.items())) for key, fields in expected.items()}
    assert dict(WAYS["stream"](tmp_path / "in" / "in.tar")) == expected
    wdskit.index_folder(tmp_path / "in", workers=1)
    assert dict(WAYS["exact"](tmp_path / "in" / "in.tar")) == expected


def _member(kind: str) -> bytes:
    """Return a member without a key that is no plain file, or whose name is not UTF-8."""
    info = tarfile.TarInfo("LISEZMOI_\udce9" if kind == "not UTF-8" else "latest")
    info.linkname = "k0.txt" if "link" in kind else ""
    info.type = {"link": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE, "fifo": tarfile.FIFOTYPE, "label": b"V"}.get(
        kind, tarfile.REGTYPE
    )
    return info.tobuf(tarfile.GNU_FORMAT, errors="surrogateescape")


@pytest.mark.parametrize("kind", ["readme", "link", "hard link", "fifo", "label", "not UTF-8"])
@pytest.mark.parametrize("way", ["stream", "LocalShard", "exact", "pack"])
def test_member_without_a_key_costs_no_sample(tmp_path: Path, kind: str, way: str) -> None:
    samples = {f"k{n}": {"cls": b"%d" % n, "txt": b"x"} for n in range(4)}
    data = tar_bytes(samples)
    parts = [b"", data[:1024], data[1024:4096], data[4096:-1024], data[-1024:]]  # it comes before, in and after samples
    (tmp_path / "in.tar").write_bytes(_member(kind).join(parts))
    if way != "pack":
        wdskit.index_folder(tmp_path, workers=1)
        assert dict(WAYS[way](tmp_path / "in.tar")) == samples
    else:
        pack(tmp_path / "in.tar", tmp_path / "d")
        assert read_folder(tmp_path / "d") == samples


def test_second_archive_after_the_end_costs_no_whole_sample_of_the_first(tmp_path: Path) -> None:
    """Its error says that another archive follows."""
    first = {f"a{n}": {"txt": b"x"} for n in range(3)}
    (tmp_path / "both.tar").write_bytes(tar_bytes(first) + tar_bytes({"b": {"txt": b"y"}}))
    found: Found = []
    with pytest.raises(WdskitError, match="archive"):
        found.extend(WAYS["stream"](tmp_path / "both.tar"))
    assert dict(found) == first
    pack(tmp_path / "both.tar", tmp_path / "d", skip_bad=True)
    assert read_folder(tmp_path / "d").items() >= first.items()
