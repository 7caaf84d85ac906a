"""Packing tars and zips, and refusals."""

from __future__ import annotations

import stat
import struct
import tarfile
import zipfile
from collections import Counter
from itertools import permutations
from pathlib import Path

import pytest
from disks import HastyDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from images import image_bytes, make_folder
from shards import bytes_in, samples_in, write_shard

from wdskit import PackError, RowError, ShardError, StorageError, WdskitError, pack
from wdskit.errors import FolderIndexError
from wdskit.packing.references import PartBytes, ZipBytes
from wdskit.packing.sources.archives import Tars, Zips, read_directory
from wdskit.packing.sources.records import Records
from wdskit.shards.index import index_folder
from wdskit.shards.verify import verify
from wdskit.storage.file_identity import FileIdentity
from wdskit.tar.writer import TarWriter

SAMPLES = {
    "cat/a": {"jpg": image_bytes(number=1), "json": b'{"n": 1.0}', "txt": b"one"},
    "cat/b": {"png": image_bytes("PNG"), "json": b"[]"},
    "dog/a": {"cls": b"3"},
}


def make_zip(path: Path, samples: dict[str, dict[str, bytes]], *, method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for key, fields in samples.items():
            for field, data in fields.items():
                file.writestr(f"{key}.{field}", data)
    return path


# Tars.


def test_samples_of_tars_are_packed_again_in_their_order(tmp_path):
    first, second = dict(list(SAMPLES.items())[:2][::-1]), dict(list(SAMPLES.items())[2:])
    write_shard(tmp_path / "s-0.tar", first)
    write_shard(tmp_path / "s-1.tar", second)
    for number, source in enumerate(["s-*.tar", "s-{0..1}.tar", "s-0.tar::s-1.tar", "s-0.tar"]):
        pattern = "::".join(str(tmp_path / part) for part in source.split("::"))
        pack(pattern, tmp_path / f"out{number}", pattern="p-%d.tar", max_samples=2)
    expected = {**first, **second}
    assert samples_in(tmp_path / "out0") == expected
    assert list(samples_in(tmp_path / "out0")) == list(expected)
    assert bytes_in(tmp_path / "out0") == bytes_in(tmp_path / "out1") == bytes_in(tmp_path / "out2")
    assert samples_in(tmp_path / "out3") == first


def test_a_folder_of_tars_is_packed_again(tmp_path):
    make_folder(tmp_path / "photos", {"cat": 3})
    pack(tmp_path / "photos", tmp_path / "first", max_samples=1)
    pack(tmp_path / "first", tmp_path / "second", shuffle=1, workers=2, max_samples=2)
    assert samples_in(tmp_path / "first") == samples_in(tmp_path / "second")
    (tmp_path / "first" / "x.jpg").write_bytes(b"")  # now the folder could be one of images
    with pytest.raises(RowError, match=r"x\.jpg"):
        pack(tmp_path / "first", tmp_path / "third")
    pack(tmp_path / "first", tmp_path / "third", from_="tar")
    assert samples_in(tmp_path / "third") == samples_in(tmp_path / "first")


def test_class_names_beside_tars_come_along_where_they_are_those_of_all(tmp_path):
    """Otherwise a number would mean another name, or no name."""
    make_folder(tmp_path / "photos", {"cat": 1, "dog": 2})
    pack(tmp_path / "photos", tmp_path / "a")
    names = tmp_path / "a" / "classes.json"
    assert pack(tmp_path / "a", tmp_path / "b").classes == {"cat": 0, "dog": 1}
    assert (tmp_path / "b" / "classes.json").read_bytes() == names.read_bytes()
    more = f"{tmp_path}/a::{tmp_path}/more"
    (tmp_path / "more").mkdir()
    write_shard(tmp_path / "more" / "m.tar", {"x": {"cls": b"1"}})
    assert pack(more, tmp_path / "c", from_="tar").classes == {}
    (tmp_path / "more" / "classes.json").write_text('["cat", "dog"]')
    assert pack(more, tmp_path / "d", from_="tar").classes == {"cat": 0, "dog": 1}
    for text, classes in (('["dog", "cat"]', {"dog": 0, "cat": 1}), ('["cat", "cat"]', {})):
        (tmp_path / "more" / "classes.json").write_text(text)
        assert pack(tmp_path / "more", tmp_path / text[2:5] / str(len(text)), pattern="p-%d.tar").classes == classes
        with pytest.raises(FolderIndexError, match="one label would mean two classes"):
            pack(more, tmp_path / "e", from_="tar", pattern="p-%d.tar")
    (tmp_path / "more" / "classes.json").write_text('{"cat": 0, "dog": 7}')
    with pytest.raises(FolderIndexError, match="not 0 to 1, each once"):
        pack(more, tmp_path / "f", from_="tar")


def test_a_tar_of_a_folder_loses_its_leading_dot_and_counts_what_is_no_member_of_a_sample(tmp_path):
    make_folder(tmp_path / "photos", {"cat": 2}, suffix=".JPEG")
    (tmp_path / "photos" / "cat" / ".hidden").write_text("x")
    with tarfile.open(tmp_path / "t.tar", "w") as file:
        file.add(tmp_path / "photos", ".")
    result = pack(tmp_path / "t.tar", tmp_path / "out")
    assert {key: list(fields) for key, fields in samples_in(tmp_path / "out").items()} == {
        "cat/0000": ["jpg"],
        "cat/0001": ["jpg"],
    }
    assert result.num_other == 1


def test_hashed_keys_stand_in_json_which_keeps_its_text(tmp_path):
    write_shard(tmp_path / "t.tar", {"a b": SAMPLES["cat/a"], "c": SAMPLES["dog/a"]})
    with pytest.raises(RowError, match=r"t.tar: a b: key 'a b': it holds white space"):
        pack(tmp_path / "t.tar", tmp_path / "out")
    pack(tmp_path / "t.tar", tmp_path / "out", keys="hashed")
    assert [sample["json"] for sample in samples_in(tmp_path / "out").values()] == [
        b'{"key":"a b","n": 1.0}',
        b'{"key":"c"}',
    ]
    write_shard(tmp_path / "u.tar", {"a": {"json": b'{"key": "b"}'}, "b": {"json": b"7"}})
    result = pack([{"__key__": "a", "cls": 1}], tmp_path / "some")
    with pytest.raises(PackError, match="none of its 2 rows is valid") as caught:
        pack(tmp_path / "u.tar", tmp_path / "other", keys="hashed", skip_bad=True)
    assert "it says 'key' is 'b', but it is 'a'" in str(caught.value)
    assert result.num_samples == 1


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda data: data[:-1024], "stops before its end marker"),
        (lambda data: data[:700], "stops inside"),
        (lambda data: b"\x1f\x8b" + data[2:], "this is a gzip file, not a tar"),
        (lambda data: data[:100] + b"x" + data[101:], "checksum"),
    ],
)
def test_a_damaged_tar_is_an_error_and_nothing_is_published(tmp_path, damage, error):
    path = write_shard(tmp_path / "t.tar", SAMPLES)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RowError, match=error):
        pack(path, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.tar"))


@pytest.mark.parametrize("is_indexed", [False, True])
def test_the_whole_samples_before_the_damage_are_packed_where_bad_rows_are_skipped(tmp_path, is_indexed):
    """The tar is cut, or a header is damaged, at any place: no partial sample is packed, and the damage is listed."""
    (tmp_path / "t").mkdir()
    path = write_shard(tmp_path / "t" / "t.tar", SAMPLES)
    if is_indexed:
        index_folder(tmp_path / "t", disk=HastyDisk())
    data = path.read_bytes()
    damaged = [data[:at] for at in range(256, len(data) - 512, 256)]
    damaged += [data[:at] + b"x" + data[at + 1 :] for at in range(2, len(data), 512)]
    kept = Counter()
    for number, one in enumerate(damaged):
        path.write_bytes(one)
        try:
            result = pack(path, tmp_path / f"{number}", skip_bad=True, validate="none", workers=1, disk=HastyDisk())
        except ShardError:
            assert is_indexed  # the headers are whole, and a field differs
            continue
        except PackError:  # there is no sample before the damage
            continue
        saved = samples_in(tmp_path / f"{number}")
        assert list(saved) == list(SAMPLES)[: len(saved)]
        assert [sample.keys() for sample in saved.values()] == [SAMPLES[key].keys() for key in saved]
        if len(one) < len(data):
            assert saved == {key: SAMPLES[key] for key in saved}
        assert result.rejected or not is_indexed
        kept[len(saved)] += 1
    assert kept.keys() >= {1, 2}


def test_samples_whose_members_are_mixed_are_never_packed_in_part(tmp_path):
    """Any order of the members gives whole samples or an error, also with `skip_bad`, and no advice to use it."""
    names = ["a.txt", "a.json", "b.txt", "b.json", "b.json"]
    for number, order in enumerate(sorted({*permutations(names)} | {*permutations(names[:4])})):
        path, out = tmp_path / f"{number}.tar", tmp_path / f"{number}"
        with path.open("wb") as file:
            writer = TarWriter(file.write)
            for name in order:
                writer.add(name, b"{}")
            writer.finish()
        if len(order) == len(names) or {name[0] for name in order[:2]} == {"a", "b"}:
            with pytest.raises(RowError, match=r"(two places|'json': twice)(?s:.*)tar --sort=name") as caught:
                pack(path, out, skip_bad=True, workers=1, disk=HastyDisk())
            assert "--skip-bad" not in str(caught.value)
            assert not list(out.glob("*.tar"))
        else:
            pack(path, out, skip_bad=True, workers=1, disk=HastyDisk())
            assert {key: sorted(fields) for key, fields in samples_in(out).items()} == {
                "a": ["json", "txt"],
                "b": ["json", "txt"],
            }


def test_a_shard_that_differs_from_its_index_is_never_packed(tmp_path):
    """This includes `skip_bad`, because it is unknown which fields are changed."""
    (tmp_path / "t").mkdir()
    path = write_shard(tmp_path / "t" / "t.tar", SAMPLES)
    index_folder(tmp_path / "t", disk=HastyDisk())
    path.write_bytes(path.read_bytes().replace(b"one", b"two"))
    with pytest.raises(ShardError, match="the index says"):
        pack(path, tmp_path / "out", skip_bad=True)
    assert not list((tmp_path / "out").glob("*.tar"))


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("gone-*.tar", "no shard matches"),
        ("gone.tar", "no such folder or file"),
    ],
)
def test_tars_that_are_not_there_are_an_error(tmp_path, monkeypatch, source, error):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((StorageError, PackError), match=error):
        pack(source, tmp_path / "out")


@pytest.mark.parametrize("suffix", ["tar", "zip"])
def test_what_is_packed_of_labels_passes_verify_and_numbers_stay_references(tmp_path, suffix):
    make = make_zip if suffix == "zip" else write_shard
    labels = [b"3", b"-1", b"2.0", b" 7\n", b"+1", b"", b"cat", b"2.5", b"\xff", b"9" * 20]
    path = make(tmp_path / f"x.{suffix}", {f"k{n}": {"cls": label, "txt": b"x"} for n, label in enumerate(labels)})
    with pytest.raises(RowError, match=r"k6: its field 'cls': 'cat' is not a whole number.*--classes FILE"):
        pack(path, tmp_path / "out")
    result = pack(path, tmp_path / "out", skip_bad=True, validate="none")
    assert [err.where.rpartition(": ")[2] for err in result.rejected] == ["k6", "k7", "k8", "k9"]
    found = [sample.get("cls") for sample in samples_in(tmp_path / "out").values()]
    assert found == [b"3", b"-1", b"2", b"7", b"1", None]
    assert verify(tmp_path / "out").is_clean
    reader = Zips([str(path)], Records("")) if suffix == "zip" else Tars(str(path), Records(""))
    row = next(iter(reader.rows(keys="given")))
    assert not isinstance(dict(row.fields)["cls"], bytes)


def test_labels_with_a_classes_json_are_its_numbers(tmp_path):
    """They are never looked up as names: here, number 0 is the class 1."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "classes.json").write_text('["1", "0"]')
    path = write_shard(tmp_path / "in" / "t.tar", {"a": {"cls": b"0"}, "b": {"cls": b"2"}})
    with pytest.raises(RowError, match="b'2' is not a number of one of the 2 classes"):
        pack(path, tmp_path / "out")
    pack(path, tmp_path / "out", skip_bad=True)
    assert samples_in(tmp_path / "out") == {"a": {"cls": b"0"}}
    assert verify(tmp_path / "out").is_clean
    with pytest.raises(PackError, match=r"in.classes.json already names the classes. Leave it out"):
        pack(path, tmp_path / "other", classes=["1", "0"])


# Zips.


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_samples_of_a_zip_are_packed_by_their_keys(tmp_path, method):
    backwards = dict(reversed(list(SAMPLES.items())))
    path = make_zip(tmp_path / "z.zip", backwards, method=method)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("__MACOSX/._x.jpg", b"x")
        file.writestr("README", b"x")
        file.mkdir("cat/") if hasattr(file, "mkdir") else file.writestr("cat/", b"")
    result = pack(path, tmp_path / "out", workers=1)
    assert samples_in(tmp_path / "out") == SAMPLES
    assert list(samples_in(tmp_path / "out")) == sorted(SAMPLES)
    assert result.num_other == 2


def test_a_folder_of_zips_is_packed_without_a_name_for_its_kind(tmp_path):
    (tmp_path / "zips").mkdir()
    names = sorted(SAMPLES)
    for at in range(2):
        make_zip(tmp_path / "zips" / f"{at}.zip", {name: SAMPLES[name] for name in names[at::2]})
    pack(tmp_path / "zips", tmp_path / "out", workers=1)
    assert samples_in(tmp_path / "out") == SAMPLES


def test_members_of_a_sample_need_not_stand_together_in_a_zip(tmp_path):
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as file:
        for name in ("b/x.txt", "a.txt", "a.js/x.txt", "b/x.json", "a.json"):
            file.writestr(name, b"{}")
    pack(tmp_path / "z.zip", tmp_path / "out", keys="hashed")
    assert sorted(sorted(sample) for sample in samples_in(tmp_path / "out").values()) == [
        ["json", "txt"],
        ["json", "txt"],
        ["json", "txt"],
    ]


def test_a_zip_with_numbers_beyond_four_bytes_and_a_comment_is_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as file:
        file.comment = b"a comment" * 9
        for key in ("a", "ä"):
            with file.open(f"{key}.txt", "w", force_zip64=True) as member:
                member.write(b"hello")
    pack(tmp_path / "z.zip", tmp_path / "out")
    assert samples_in(tmp_path / "out") == {"a": {"txt": b"hello"}, "ä": {"txt": b"hello"}}


def test_a_zip_of_more_members_than_two_bytes_count_is_read(tmp_path):
    """The zip repeats one entry of zipfile 70,000 times, with a zip64 end record like zipfile's."""
    num = 70_000
    path = make_zip(tmp_path / "z.zip", {"a": {"txt": b"1"}})
    data = path.read_bytes()
    at, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    local, record = data[:at], data[at:end]
    records = b"".join(record[:42] + struct.pack("<L", at * number) + record[46:] for number in range(num))
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, num, num, len(records), at * num)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, at * num + len(records), 1)
    full = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(b"".join([local * num, records, end64, locator, full]))
    with zipfile.ZipFile(path) as file:
        assert len(file.infolist()) == num
    members = [member for _, member in read_directory(str(path))]
    assert [member.header_offset for member in members] == [at * number for number in range(num)]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("22.05.jpg", "the dot in 22.05.jpg ends its key"),
        ("a b.txt", "white space"),
        ("../a.txt", "plain relative path"),
        ("/etc/a.txt", "absolute path"),
        ("a.TXT", "twice"),
    ],
)
def test_names_that_make_no_sample_are_errors_of_their_row(tmp_path, name, problem):
    path = make_zip(tmp_path / "z.zip", {"a": {"txt": b"1"}, "b": {"txt": b"2"}})
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(name, b"x")
    with pytest.raises(RowError, match=problem):
        pack(path, tmp_path / "out")
    assert pack(path, tmp_path / "out", skip_bad=True).num_samples in {1, 2}


def flagged(data: bytes, at: int, value: bytes, start: bytes = b"PK\x01\x02") -> bytes:
    place = data.index(start) + at
    return data[:place] + value + data[place + len(value) :]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda data: data[:-1], "it cannot be read as a zip: File is not a zip file"),
        (lambda data: flagged(data, 8, b"\x01"), "is encrypted"),
        (lambda data: flagged(data, 10, b"\x0c"), "compressed by method 12"),
        (lambda data: flagged(data, 20, b"\xff\xff\xff\x7f"), "extends past byte"),
        (lambda data: flagged(data, 42, b"\xff\xff\xff\xff"), "extends past byte"),
        (lambda data: flagged(data, 42, b"\x20"), "overlap"),
        (lambda data: flagged(data, 46, b"\x00"), "a member is called"),
        (lambda data: flagged(data, 46, b"\xff"), "is not UTF-8"),
        (lambda data: flagged(data, 0, b"x"), "cannot be read as a zip: Bad magic number"),
        (lambda _: b"", "it cannot be read as a zip"),
        (lambda _: b"PK\x05\x06" + bytes(18), "there is nothing to pack"),
    ],
)
def test_a_damaged_zip_is_an_error(tmp_path, damage, problem):
    path = make_zip(tmp_path / "z.zip", {"a": {"txt": b"1"}, "b": {"txt": b"2"}})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(PackError, match=problem):
        pack(path, tmp_path / "out", skip_bad=True)


def test_links_in_zips_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as file:
        info = zipfile.ZipInfo("a.txt")
        info.create_system = 3
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(info, "/etc/passwd")
    with pytest.raises(PackError, match=r"'a.txt' is a symbolic link"):
        pack(tmp_path / "z.zip", tmp_path / "out")


def test_a_flipped_bit_of_a_member_is_found_when_it_is_packed(tmp_path):
    path = make_zip(tmp_path / "z.zip", {"a": {"txt": b"hello" * 30}})
    whole = path.read_bytes()
    for at in range(30 + len("a.txt"), whole.index(b"PK\x01\x02")):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(RowError, match=r"z.zip: (the member|the CRC-32 of the member) at byte 0"):
            pack(path, tmp_path / "out")


@given(st.data())
@settings(max_examples=150)
def test_any_damage_of_a_zip_gives_its_members_or_an_error_of_wdskit(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("zips")
    path = make_zip(folder / "z.zip", {"a": {"txt": b"1"}, "b": {"txt": b"2" * 40}})
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(whole))
    try:
        rows = [row for row in Zips([str(path)], Records("")).rows(keys="given") if not isinstance(row, RowError)]
        found = [row.read() for row in rows]
    except WdskitError as err:
        assert "z.zip" in str(err)  # noqa: PT017
    else:
        assert all(data in {b"1", b"2" * 40} for members in found for _, data in members)


def test_a_name_in_utf8_without_its_flag_is_read_as_such(tmp_path):
    """Archives of macOS have such names; zipfile decodes them as cp437."""
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as file:
        file.writestr("\u00e4.txt", b"hello")
    data = (tmp_path / "z.zip").read_bytes()
    for start, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data = flagged(data, at, b"\0\0", start)
    (tmp_path / "z.zip").write_bytes(data)
    pack(tmp_path / "z.zip", tmp_path / "out")
    assert samples_in(tmp_path / "out") == {"\u00e4": {"txt": b"hello"}}


# Files that change while they are packed.


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_that_grows_while_it_is_packed_is_an_error(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    (write_shard if kind == "tar" else make_zip)(path, SAMPLES)

    def grow(now):
        if (now.stage, now.num_samples) == ("packing", 1):
            with path.open("ab") as file:
                file.write(b"\0")

    size = path.stat().st_size
    with pytest.raises(RowError, match=f"the file has {size + 1} bytes now, but had {size} when packing began"):
        pack(path, tmp_path / "out", progress=grow)


def test_parts_that_are_not_there_are_errors(tmp_path):
    path = make_zip(tmp_path / "z.zip", {"a": {"txt": b"1"}}, method=zipfile.ZIP_STORED)
    identity = FileIdentity.of(str(path))
    for num_bytes in (10, 1 << 60):  # more than the memory
        with pytest.raises(ValueError, match="the file stops at byte"):
            PartBytes(str(path), num_bytes, identity.num_bytes - 5, *identity).read()
    with pytest.raises(ValueError, match="no member begins at byte 1"):
        ZipBytes(str(path), 1, 1, 1, False, 0, *identity).read()
    with pytest.raises(FileNotFoundError):
        PartBytes(str(tmp_path / "gone"), 1, 0, *identity).read()
    assert PartBytes(str(path), 0, 3, *identity).read() == b""
    assert PartBytes(str(path), 2, 0, *identity).read() == b"PK"
