"""Packing a folder of images, the files next to images, and folders of other files; refusals."""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from images import image_bytes, make_folder
from PIL import Image
from shards import bytes_in, samples_in, write_shard

from wdskit import PackError, RowError, pack, verify
from wdskit.dataset.keys import check_key
from wdskit.packing.json_merge import add_metadata
from wdskit.packing.references import FileBytes
from wdskit.packing.row import clean_key, file_bytes
from wdskit.packing.sources.folder import FileNames, walk_files


def test_a_folder_of_classes_becomes_images_with_numbers_and_json(tmp_path):
    source = make_folder(tmp_path / "photos", {"dog": 2, "cat": 1})
    (source / "empty").mkdir()
    (source / "cat" / "notes.txt").write_text("no image")
    (source / "cat" / ".hidden.jpg").write_bytes(b"no image")
    (source / ".git").mkdir()
    (source / ".git" / "x.jpg").write_bytes(b"no image")
    result = pack(source, tmp_path / "out")
    assert result.classes == {"cat": 0, "dog": 1, "empty": 2}
    assert (result.num_samples, result.num_other) == (3, 1)
    samples = samples_in(tmp_path / "out")
    assert list(samples) == ["cat/0000", "dog/0000", "dog/0001"]
    assert samples["dog/0001"] == {
        "cls": b"1",
        "jpg": (source / "dog" / "0001.jpg").read_bytes(),
        "json": b'{"cls":1,"class":"dog","path":"dog/0001.jpg"}',
    }
    assert json.loads((tmp_path / "out" / "classes.json").read_bytes()) == {"cat": 0, "dog": 1, "empty": 2}
    assert list(bytes_in(tmp_path / "out")) == [
        "classes.json", "index.bin", "index.json", "out-000000.tar", "out-000000.tar.idx",
    ]  # fmt: skip


def test_a_flat_folder_has_no_classes(tmp_path):
    source = make_folder(tmp_path / "photos", {".": 2})
    (source / "notes").mkdir()
    (source / "notes" / "readme.txt").write_text("no image")
    assert pack(source, tmp_path / "out").classes == {}
    assert samples_in(tmp_path / "out")["0001"] == {
        "jpg": (source / "0001.jpg").read_bytes(),
        "json": b'{"path":"0001.jpg"}',
    }
    assert not (tmp_path / "out" / "classes.json").exists()


def test_images_beside_class_folders_are_refused(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 1, ".": 1})
    with pytest.raises(PackError, match=r"0000.jpg: it is beside the class folders"):
        pack(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["nothing", "empty", "texts"])
def test_a_folder_without_an_image_is_an_error(tmp_path, name):
    (tmp_path / "empty" / "below").mkdir(parents=True)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "jpg").write_text("jpg")
    with pytest.raises(PackError, match=f"{name}: there is no"):
        pack(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_classes_are_numbered_by_the_bytes_of_their_names(tmp_path):
    """The order of the locale does not count."""
    source = make_folder(tmp_path / "photos", {"ä": 1, "b": 1, "B": 1, "a": 1, "10": 1, "9": 1, "a-b": 1})
    names = ["10", "9", "B", "a", "a-b", "b", "ä"]
    assert pack(source, tmp_path / "out").classes == {name: number for number, name in enumerate(names)}
    assert (tmp_path / "out" / "classes.json").read_text() == (
        "{\n" + ",\n".join(f'"{name}": {number}' for number, name in enumerate(names)) + "\n}\n"
    )


def test_deeper_folders_belong_to_their_class_and_extensions_are_lowered(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat/indoor": 1, "cat": 1}, suffix=".JPEG")
    (source / "cat" / "a.PNG").write_bytes(image_bytes("PNG"))
    pack(source, tmp_path / "out")
    samples = samples_in(tmp_path / "out")
    assert {key: sorted(fields) for key, fields in samples.items()} == {
        "cat/0000": ["cls", "jpg", "json"],
        "cat/a": ["cls", "json", "png"],
        "cat/indoor/0000": ["cls", "jpg", "json"],
    }
    assert json.loads(samples["cat/indoor/0000"]["json"])["class"] == "cat"


def test_folders_may_lie_deeper_than_python_calls(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat" + "/a" * 200: 1})
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len_of_stack() + 120)
    try:
        images = walked(source)
    finally:
        sys.setrecursionlimit(limit)
    assert images == ["cat" + "/a" * 200 + "/0000.jpg"]


def walked(folder: Path) -> list[str]:
    return [path for path, _ in walk_files(str(folder), lambda names: dict.fromkeys(names, ()))]


def len_of_stack() -> int:
    frame, depth = sys._getframe(), 0
    while frame:
        frame, depth = frame.f_back, depth + 1
    return depth


def test_links_are_followed_and_rings_end(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 1})
    (source / "cat" / "again").symlink_to(source)
    (source / "linked").symlink_to(make_folder(tmp_path / "elsewhere", {".": 1}))
    (source / "cat" / "other.jpg").symlink_to(tmp_path / "elsewhere" / "0000.jpg")
    pack(source, tmp_path / "out")
    samples = samples_in(tmp_path / "out")
    assert list(samples) == ["cat/0000", "cat/other", "linked/0000"]
    assert samples["cat/other"]["jpg"] == samples["linked/0000"]["jpg"]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.symlink_to("nowhere"), "No such file or directory"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (os.mkfifo, "is not a file"),
    ],
    ids=["nowhere", "itself", "pipe"],
)
def test_what_is_called_as_an_image_and_is_no_file_is_an_error(tmp_path, make, problem):
    source = make_folder(tmp_path / "photos", {"cat": 1})
    make(source / "cat" / "odd.jpg")
    make(source / "cat" / "odd")  # not an image by its name: counted with the others, not opened
    with pytest.raises(RowError, match=f"odd.jpg.*{problem}"):
        pack(source, tmp_path / "out")
    result = pack(source, tmp_path / "out", skip_bad=True)
    assert [err.where for err in result.rejected] == [str(source / "cat" / "odd.jpg")]
    assert (result.num_samples, result.num_other) == (1, 1)


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    source = make_folder(tmp_path / "photos", {"cat": 1, "dog": 1})
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PackError, match=r"dog: cannot be listed: Permission denied"):
        pack(source, tmp_path / "out")


def test_two_files_of_one_key_are_refused_with_both_names(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 1})
    (source / "cat" / "0000.png").write_bytes(image_bytes("PNG"))
    with pytest.raises(RowError, match=r"0000.png: its key 'cat/0000' is also the key of .*0000.jpg"):
        pack(source, tmp_path / "out")
    with pytest.raises(
        RowError, match="Rename one; or, for a table, choose a column"
    ):  # not a bad row, but not a data set either
        pack(source, tmp_path / "out", skip_bad=True)
    pack(source, tmp_path / "hashed", keys="hashed")  # hash of the whole path
    assert len(samples_in(tmp_path / "hashed")) == 2


@pytest.mark.parametrize("name", ["a b", "a.b", "ä" * 60, "__a", "a\x01b", "a\nb"])
def test_names_that_some_reader_loses_are_refused_or_hashed(tmp_path, name):
    source = make_folder(tmp_path / "photos", {"cat": 1})
    (source / "cat" / f"{name}.jpg").write_bytes(image_bytes())
    with pytest.raises(RowError, match="--keys hashed"):
        pack(source, tmp_path / "out")
    pack(source, tmp_path / "hashed", keys="hashed")
    samples = samples_in(tmp_path / "hashed")
    assert {json.loads(sample["json"])["path"] for sample in samples.values()} == {"cat/0000.jpg", f"cat/{name}.jpg"}
    assert all(key.isascii() and key.isalnum() for key in samples)


def test_hashed_keys_that_collide_are_an_error(tmp_path, monkeypatch):
    from wdskit.packing import row

    monkeypatch.setattr(row, "hashed_key", lambda path: "0" * 20)
    with pytest.raises(RowError, match=r"0001.jpg: its key '0{20}' is also the key of .*0000.jpg"):
        pack(make_folder(tmp_path / "photos", {".": 2}), tmp_path / "out", keys="hashed")


def test_names_that_are_no_utf8_are_errors(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 1})
    bad = os.fsdecode(b"\xff.jpg")
    (source / "cat" / bad).write_bytes(image_bytes())
    with pytest.raises(RowError, match=r"its path is not UTF-8"):
        pack(source, tmp_path / "out", keys="hashed")
    result = pack(source, tmp_path / "out", skip_bad=True)
    (line,) = (tmp_path / "out" / "rejected.jsonl").read_bytes().splitlines()
    assert json.loads(line) == {"where": str(source / "cat" / bad), "reason": "its path is not UTF-8"}
    assert [err.where for err in result.rejected] == [str(source / "cat" / bad)]
    (source / os.fsdecode(b"\xfe")).mkdir()
    with pytest.raises(PackError, match=r"the name of this class is not UTF-8"):
        pack(source, tmp_path / "other", skip_bad=True)


# Images, and files that are not images.


def pixels_of(kind: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (5, 4), (10, 200, 30)).save(stream, kind)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("kind", "suffix", "field"),
    [
        ("JPEG", ".jpe", "jpe"),
        ("JPEG", ".Jpeg", "jpg"),
        ("PNG", ".png", "png"),
        ("WEBP", ".webp", "webp"),
        ("GIF", ".gif", "gif"),
        ("BMP", ".BMP", "bmp"),
        ("TIFF", ".tif", "tif"),
        ("PPM", ".ppm", "ppm"),
    ],
)
def test_every_kind_of_image_is_kept_byte_for_byte(tmp_path, kind, suffix, field):
    make_folder(tmp_path / "photos", {"cat": 0})
    (tmp_path / "photos" / "cat" / f"a{suffix}").write_bytes(pixels_of(kind))
    pack(tmp_path / "photos", tmp_path / "out")
    assert samples_in(tmp_path / "out")["cat/a"][field] == pixels_of(kind)


def test_a_mask_beside_an_image_is_an_error_that_names_its_option(tmp_path):
    for name in ("a.jpg", "a.seg.png"):
        (tmp_path / name).write_bytes(image_bytes())
    with pytest.raises(RowError, match=r"key 'a.seg': it holds a dot.*\n.* use --sidecars seg\.png\. If not, rename"):
        pack(tmp_path, tmp_path.parent / "out")


def test_what_is_packed_is_clean_to_verify_whatever_the_images_are_called(tmp_path):
    """ImageNet has a PNG with the name of a JPEG."""
    source = make_folder(tmp_path / "photos", {"cat": 3, "dog": 2})
    for name, kind in (("a.png", "PNG"), ("b.webp", "WEBP"), ("c.JPEG", "JPEG"), ("d.gif", "GIF"), ("e.tif", "TIFF")):
        (source / "cat" / name).write_bytes(image_bytes(kind))
    wrong = source / "dog" / "wrong.jpg"
    wrong.write_bytes(image_bytes("PNG"))
    with pytest.raises(RowError, match=r"wrong.jpg: the name says JPEG, but it is a PNG file.\n  Repair, rename or"):
        pack(source, tmp_path / "out")
    for name, options in (
        ("skipped", {"skip_bad": True}),
        ("transformed", {"format": "png"}),
        ("turned", {"orient": True}),
    ):
        pack(source, tmp_path / name, **options)
        assert verify(tmp_path / name).findings == ()
    assert "png" in samples_in(tmp_path / "turned")["dog/wrong"]
    pack(source, tmp_path / "unseen", validate="none")
    assert [found.kind for found in verify(tmp_path / "unseen").findings] == ["image"]
    wrong.rename(wrong.with_suffix(".png"))
    pack(source, tmp_path / "out")
    assert verify(tmp_path / "out").findings == ()


def test_an_image_that_stays_as_it_is_among_treated_ones_is_checked_by_its_name_too(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(image_bytes("BMP"))
    with pytest.raises(RowError, match=r"a.jpg: .*the name says JPEG, but it is a BMP file"):
        pack(tmp_path / "photos", tmp_path / "out", resize=100)
    pack(tmp_path / "photos", tmp_path / "out", resize=4, format="png")
    assert verify(tmp_path / "out").findings == ()


@pytest.mark.parametrize("kind", ["rows", "tar", "sidecar"])
def test_json_that_does_not_read_is_refused_as_verify_would(tmp_path, kind):
    bad = b'{"a": 1,}'
    if kind == "rows":
        source, options = [{"__key__": "a", "json": bad}], {}
    elif kind == "tar":
        source, options = write_shard(tmp_path / "a.tar", {"a": {"json": bad}}), {}
    else:
        source, options = make_folder(tmp_path / "photos", {"cat": 1}), {"sidecars": ["meta.json"]}
        (source / "cat" / "0000.meta.json").write_bytes(bad)
    with pytest.raises(RowError, match=r"json: "):
        pack(source, tmp_path / "out", **options)
    pack(source, tmp_path / "out", validate="none", **options)
    assert [found.kind for found in verify(tmp_path / "out").findings] == ["json"]


BAD_IMAGES = {
    "cut": image_bytes()[:-20],
    "empty": b"",
    "text": b"<html>404</html>",
    "png cut": image_bytes("PNG")[:-12],
    "png flipped": image_bytes("PNG")[:50] + b"\xff" + image_bytes("PNG")[51:],
    "bomb": image_bytes("PNG")[:16] + b"\x00\x01\x00\x00" * 2 + image_bytes("PNG")[24:],
    "webp cut": pixels_of("WEBP")[:-4],
}


@pytest.mark.parametrize(
    ("kind", "workers"), [*((kind, 1) for kind in BAD_IMAGES), ("cut", 2)]
)  # one case with workers is enough: spawning takes a second
def test_a_bad_image_is_an_error_that_names_its_file_or_is_listed(tmp_path, kind, workers):
    source = make_folder(tmp_path / "photos", {"cat": 2})
    bad = source / "cat" / "0001.jpg"
    bad.write_bytes(BAD_IMAGES[kind])
    with pytest.raises(RowError, match=r"0001.jpg: ") as caught:
        pack(source, tmp_path / "out", workers=workers, max_samples=1)
    assert caught.value.where == str(bad)
    assert not (tmp_path / "out" / "index.json").exists()

    result = pack(source, tmp_path / "out2", skip_bad=True, workers=workers)
    assert [err.where for err in result.rejected] == [str(bad)]
    (line,) = (tmp_path / "out2" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line) == {"where": str(bad), "reason": result.rejected[0].problem}
    assert list(samples_in(tmp_path / "out2")) == ["cat/0000"]


def test_a_jpeg_cut_at_any_byte_is_refused(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 1})
    whole = image_bytes()
    for size in range(len(whole)):
        (source / "cat" / f"cut-{size:04d}.jpg").write_bytes(whole[:size])
    result = pack(source, tmp_path / "out", skip_bad=True)
    assert list(samples_in(tmp_path / "out")) == ["cat/0000"]
    assert len(result.rejected) == len(whole)


def test_the_list_of_rejected_rows_is_exact_and_in_order(tmp_path, monkeypatch):
    """The list is the same for any number of workers; places and reasons are those of a row's error."""
    make_folder(tmp_path / "photos", {"cat": 3, "ä": 1})
    monkeypatch.chdir(tmp_path)
    Path("photos/cat/0001.jpg").write_bytes(b"")
    Path("photos/cat/0002.jpg").write_bytes(BAD_IMAGES["png cut"])
    Path("photos/cat/a b.jpg").write_bytes(image_bytes())
    Path("photos/ä/0000.jpg").unlink()
    Path("photos/ä/0000.jpg").symlink_to("nowhere")
    png = len(BAD_IMAGES["png cut"])
    expected = f"""\
{{"where": "photos/cat/0001.jpg", "reason": "not an image of a known format; the file is empty"}}
{{"where": "photos/cat/0002.jpg", "reason": "PNG, byte {png}: the file stops at byte {png}, before its end chunk"}}
{{"where": "photos/cat/a b.jpg", "reason": "key 'cat/a b': it holds white space, which breaks DALI's index"}}
{{"where": "photos/ä/0000.jpg", "reason": "No such file or directory"}}
"""
    for workers in (1, 2):
        pack("photos", f"out{workers}", skip_bad=True, workers=workers)
        assert Path(f"out{workers}/rejected.jsonl").read_text(encoding="utf-8") == expected
        assert list(samples_in(Path(f"out{workers}"))) == ["cat/0000"]


def test_when_every_image_is_bad_the_error_says_why(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 5})
    for path in source.rglob("*.jpg"):
        path.write_bytes(b"none")
    with pytest.raises(PackError, match="nothing to pack: none of its 5 rows is valid") as caught:
        pack(source, tmp_path / "out", skip_bad=True)
    lines = str(caught.value).splitlines()
    assert lines[1:] == [
        f"  {source}/cat/000{n}.jpg: not an image of a known format; it starts with b'none' (4 bytes in all)"
        for n in range(3)
    ]
    assert not (tmp_path / "out").exists()


# Files that change while they are packed.


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("change", ["grows", "shrinks", "goes", "is cut"])
def test_a_file_that_changes_while_it_is_packed_is_an_error(tmp_path, change, skip_bad):
    source = make_folder(tmp_path / "photos", {"cat": 2})
    path = source / "cat" / "0001.jpg"
    whole = path.read_bytes()
    os.utime(path, ns=(1, 1))  # file systems round the times of files

    def change_it(now):
        if (now.stage, now.num_samples) != ("packing", 1):
            return
        if change == "goes":
            path.unlink()
        else:
            path.write_bytes({"grows": whole + b"more", "shrinks": whole[:-1], "is cut": whole[:-9] + bytes(9)}[change])

    with pytest.raises(RowError, match=r"0001.jpg: ") as caught:
        pack(source, tmp_path / "out", skip_bad=skip_bad, progress=change_it)
    expected = {
        "grows": f"the file has {len(whole) + 4} bytes now, but had {len(whole)} when packing began",
        "shrinks": f"the file has {len(whole) - 1} bytes now, but had {len(whole)} when packing began",
        "goes": "No such file or directory",
        "is cut": "the file was replaced or rewritten after packing began",
    }[change]
    assert expected in str(caught.value)
    assert list(bytes_in(tmp_path / "out")) == []


def test_no_more_of_a_file_is_read_than_was_planned(tmp_path):
    """Packing a file that grows for ever ends."""
    path = tmp_path / "log"
    path.write_bytes(bytes(10))
    source = file_bytes(str(path), "")
    with path.open("wb") as file:
        file.truncate(1 << 33)
    for read in (FileBytes.read, into_memory):
        with pytest.raises(ValueError, match=f"the file has {1 << 33} bytes now, but had 10 when packing began"):
            read(source)


def into_memory(source: FileBytes) -> bytes:
    memory = bytearray(b"\xff" * source.num_bytes)
    source.read_into(memoryview(memory))
    return bytes(memory)


@pytest.mark.parametrize("most", [1, 2, 7, 100])
@pytest.mark.parametrize("change", [-20, -3, -1, 0, 1, 5])
@pytest.mark.parametrize("read", [FileBytes.read, into_memory])
def test_a_file_that_comes_in_parts_is_read_whole_or_an_error(tmp_path, monkeypatch, read, change, most):
    """Network disks return parts, and the kernel does so above 2 GiB."""
    whole = bytes(range(20 + change))
    (tmp_path / "a").write_bytes(bytes(20))
    source = file_bytes(str(tmp_path / "a"), "")
    if change:
        (tmp_path / "a").write_bytes(whole)
    else:
        with (tmp_path / "a").open("r+b") as file:
            file.write(whole)
        os.utime(tmp_path / "a", ns=(source.mtime_ns, source.mtime_ns))
    os_read, os_readv = os.pread, os.readv
    monkeypatch.setattr(os, "pread", lambda fd, size, at: os_read(fd, min(size, most), at))
    monkeypatch.setattr(
        os, "readv", lambda fd, views: os_readv(fd, [memoryview(views[0])[:most]] if most < len(views[0]) else views)
    )
    if change == 0:
        assert read(source) == whole
    else:
        with pytest.raises(ValueError, match=f"the file has {20 + change} bytes now, but had 20"):
            read(source)


LARGE = {"a": 16_383, "b": 16_384, "c": (1 << 20) - 512, "d": (1 << 20) - 511, "e": 100_000, "f": 3 << 20, "g": 70_000}


@pytest.mark.parametrize("export", [(), ("energon", "dali")])
def test_large_files_are_packed_as_small_ones(tmp_path, export):
    """They are read into the buffer that is written, unless several threads read ahead."""
    for number, (name, size) in enumerate(LARGE.items()):
        path = tmp_path / "photos" / name / "0.jpg"
        path.parent.mkdir(parents=True)
        start = image_bytes("JPEG", number=number)
        path.write_bytes(start + bytes([number]) * (size - len(start)))  # like the previews that phones append
    pack(tmp_path / "photos", tmp_path / "here", export=export)
    pack(tmp_path / "photos", tmp_path / "threads", export=export, threads=2, pattern="here-%06d.tar")
    assert bytes_in(tmp_path / "here") == bytes_in(tmp_path / "threads")
    for key, fields in samples_in(tmp_path / "here").items():
        assert fields["jpg"] == (tmp_path / "photos" / f"{key}.jpg").read_bytes()


@pytest.mark.parametrize("change", [b"", b"x", b"xx", None])
def test_a_large_file_that_changed_since_it_was_planned_fails_its_shard(tmp_path, change):
    source = make_folder(tmp_path / "photos", {"cat": 3})
    path = source / "cat" / "0001.jpg"
    whole = path.read_bytes() + bytes(60_000)
    path.write_bytes(whole)
    os.utime(path, ns=(1, 1))  # file systems round the times of files

    def change_it(now):
        if (now.stage, now.num_samples) == ("packing", 0):
            path.write_bytes(b"\0" * len(whole) if change is None else whole[:-1] + change)

    with pytest.raises(RowError, match=r"0001.jpg: "):
        pack(source, tmp_path / "out", progress=change_it)
    assert list(bytes_in(tmp_path / "out")) == []


def test_a_file_that_no_tar_takes_is_an_error_before_it_is_read(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 1})
    with (source / "cat" / "large.jpg").open("wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(RowError, match=r"large.jpg: its field 'jpg' has 8589934592 bytes, more than the 8589934591"):
        pack(source, tmp_path / "out", max_bytes=20 << 30)
    with pytest.raises(RowError, match=r"large.jpg: even alone in its shard it takes \d+ bytes, more than max_bytes"):
        (source / "cat" / "large.jpg").write_bytes(b"")
        with (source / "cat" / "large.jpg").open("wb") as file:
            file.truncate((8 << 30) - 1)
        pack(source, tmp_path / "out", max_bytes=8 << 30)
    assert not (tmp_path / "out").exists() or list(bytes_in(tmp_path / "out")) == []


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


# Files next to an image.


def test_files_beside_an_image_become_fields_of_its_sample(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 2, "dog": 1})
    mask = image_bytes("PNG")
    write(
        source / "cat",
        {"0000.json": b'{"a": 1.50}', "0000.txt": b"a cat", "0000.seg.PNG": mask, "0001.TXT": b"x", "alone.txt": b""},
    )
    result = pack(source, tmp_path / "out", sidecars=["json", "txt", "seg.png"])
    samples = samples_in(tmp_path / "out")
    assert samples["cat/0000"] == {
        "cls": b"0",
        "jpg": (source / "cat" / "0000.jpg").read_bytes(),
        "json": b'{"cls":0,"class":"cat","path":"cat/0000.jpg","a": 1.50}',
        "seg.png": mask,
        "txt": b"a cat",
    }
    assert {key: sorted(fields) for key, fields in samples.items()} == {
        "cat/0000": ["cls", "jpg", "json", "seg.png", "txt"],
        "cat/0001": ["cls", "jpg", "json", "txt"],
        "dog/0000": ["cls", "jpg", "json"],
    }
    assert (result.num_samples, result.num_other) == (3, 1)  # alone.txt


def test_without_the_option_files_beside_an_image_are_counted_and_change_nothing(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 2})
    pack(source, tmp_path / "before", pattern="s-%d.tar")
    write(source / "cat", {"0000.json": b"{}", "0000.txt": b"a cat"})
    result = pack(source, tmp_path / "after", pattern="s-%d.tar")
    assert result.num_other == 2
    assert bytes_in(tmp_path / "before") == bytes_in(tmp_path / "after")


def test_keys_with_dots_are_not_cut_and_find_their_own_sidecars(tmp_path):
    source = write(
        tmp_path / "photos",
        {"22.05.jpg": image_bytes(number=5), "22.06.jpg": image_bytes(number=6), "22.05.txt": b"5", "22.06.txt": b"6"},
    )
    with pytest.raises(RowError, match=r"22.05.jpg: key '22.05': it holds a dot"):
        pack(source, tmp_path / "out", sidecars=["txt"])
    pack(source, tmp_path / "out", sidecars=["txt"], keys="hashed")
    found = {json.loads(sample["json"])["path"]: sample["txt"] for sample in samples_in(tmp_path / "out").values()}
    assert found == {"22.05.jpg": b"5", "22.06.jpg": b"6"}


def test_a_folder_whose_name_sorts_between_an_image_and_its_sidecar_parts_them_not(tmp_path):
    source = write(
        tmp_path / "photos", {"c/a.jpg": image_bytes(), "c/a.json": b'{"x":1}', "c/a.js/b.jpg": image_bytes()}
    )
    pack(source, tmp_path / "out", sidecars=["json"], keys="hashed")
    assert sum(b'"x":1' in sample["json"] for sample in samples_in(tmp_path / "out").values()) == 1


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"path": "elsewhere"}', r"it says 'path' is 'elsewhere', but it is 'cat/0000.jpg'"),
        (b'{"cls": 1}', r"it says 'cls' is 1, but it is 0"),
        (b'{"cls": false}', r"it says 'cls' is False, but it is 0"),
        (b"[1]", "it holds a list, to which cls, class, path cannot be added"),
        (b'{"path": "cat/0000.jpg", "path": "cat/0000.jpg"}', "the name 'path' appears twice"),
        (b'{"path": "b", "path": "cat/0000.jpg"}', "it says 'path' is 'b', but it is 'cat/0000.jpg'"),
        (b'{"a": "\xff"}', "codec can't decode"),
        (b"", "Expecting value"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply|maximum recursion"),
        (b'{"a": "' + b"x" * (4 << 20) + b'"}', "more than the 4194304 that the JSON of one sample can have"),
    ],
)
def test_json_that_cannot_stand_with_what_is_known_is_an_error_of_its_row(tmp_path, data, problem):
    source = make_folder(tmp_path / "photos", {"cat": 2})
    write(source / "cat", {"0000.json": data})
    with pytest.raises(RowError, match=rf"0000.jpg: .*0000.json: .*({problem})"):
        pack(source, tmp_path / "out", sidecars=["json"])
    result = pack(source, tmp_path / "out", sidecars=["json"], skip_bad=True)
    assert (result.num_samples, len(result.rejected)) == (1, 1)


def test_facts_that_are_stated_already_are_not_said_twice():
    assert add_metadata(b' {"b": 1e5, "a" : 1}\n', {"a": 1, "c": 2}) == b' {"c":2,"b": 1e5, "a" : 1}\n'
    assert add_metadata(b'\xef\xbb\xbf{"a":1}', {"a": 1}) == b'\xef\xbb\xbf{"a":1}'
    assert add_metadata(b"{ }", {"a": 1}) == b'{"a":1 }'


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(st.dictionaries(st.text(max_size=3), json_values, max_size=4), st.sampled_from([None, 1]))
def test_nothing_of_an_object_is_lost_when_facts_are_added(own, indent):
    own = {name: value for name, value in own.items() if name not in {"path", "cls"}}
    text = json.dumps(own, indent=indent).encode()
    both = add_metadata(text, {"path": "p", "cls": 3})
    assert json.loads(both) == {"path": "p", "cls": 3, **own}
    assert both.endswith(text[1:])


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"0000.cls": b"7"}, "already has the field 'cls'"),
        ({"0000.txt": b"1", "0000.TXT": b"2"}, "already has the field 'txt'"),
    ],
)
def test_two_files_for_one_field_are_an_error(tmp_path, files, problem):
    source = make_folder(tmp_path / "photos", {"cat": 1})
    write(source / "cat", files)
    with pytest.raises(RowError, match=problem):
        pack(source, tmp_path / "out", sidecars=["txt", "cls"])


@pytest.mark.parametrize("names", [["JSON"], ["a b"], [""], [".txt"]])
def test_what_is_no_extension_is_refused(tmp_path, names):
    with pytest.raises(PackError, match="sidecars: "):
        pack(make_folder(tmp_path / "photos", {"cat": 1}), tmp_path / "out", sidecars=names)


def test_sidecars_belong_to_image_folders(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"key": "a"}\n')
    with pytest.raises(PackError, match="sidecars is for an image folder, but this is a table of text"):
        pack(tmp_path / "m.jsonl", tmp_path / "out", sidecars=["txt"])
    with pytest.raises(PackError, match="sidecars is for an image folder, but these are rows from Python"):
        pack([], tmp_path / "out", sidecars=["txt"])


def test_every_file_is_an_image_a_sidecar_of_one_or_counted():
    """All sets of up to four of these names are tested."""
    names = ["a.jpg", "a.png", "a.seg.png", "a.b.jpg", "a.b.txt", "a.txt", "a.gif.txt", "a"]
    cars = FileNames(["txt", "seg.png"])
    for size in range(5):
        for paths in itertools.combinations(names, size):
            images = cars.samples(paths)
            used = {*images, *(path for beside in images.values() for _, path in beside)}
            assert used <= set(paths)
            assert all(path == f"{image[:-4]}.{car}" for image, beside in images.items() for car, path in beside)
            for path in set(paths) - used:
                assert path == "a" or not {*paths} & {f"{path.removesuffix('.txt').removesuffix('.seg.png')}.jpg"}


# The walk.


def test_the_walk_is_in_the_order_of_the_paths_bytes(tmp_path):
    """All paths are sorted by bytes: the slash comes after the dot and before 0."""
    names = ["a.jpg", "a/b.jpg", "a-b/c.jpg", "a0/c.jpg", "a/b/c.jpg", "a/b-/c", "ä/x", "B/x", "a/b.d/x", "a.d/y"]
    for name in names:
        write(tmp_path, {name: b""})
    assert walked(tmp_path) == sorted(names, key=os.fsencode)


# Files that are not images.


def test_files_of_other_kinds_are_samples_where_they_are_asked_for(tmp_path):
    source = write(
        tmp_path / "sounds",
        {
            "bark/a.wav": b"RIFFa",
            "bark/a.txt": b"a dog",
            "bark/b.FLAC": b"fLaC",
            "meow/c.wav": b"RIFFc",
            "meow/d.jpg": b"",
        },
    )
    result = pack(source, tmp_path / "out", files=["wav", "flac"], sidecars=["txt"])
    assert result.classes == {"bark": 0, "meow": 1}
    assert result.num_other == 1
    assert samples_in(tmp_path / "out") == {
        "bark/a": {
            "cls": b"0",
            "json": b'{"cls":0,"class":"bark","path":"bark/a.wav"}',
            "txt": b"a dog",
            "wav": b"RIFFa",
        },
        "bark/b": {"cls": b"0", "flac": b"fLaC", "json": b'{"cls":0,"class":"bark","path":"bark/b.FLAC"}'},
        "meow/c": {"cls": b"1", "json": b'{"cls":1,"class":"meow","path":"meow/c.wav"}', "wav": b"RIFFc"},
    }
    with pytest.raises(PackError, match=r"there is no \.mp3 file in this folder"):
        pack(source, tmp_path / "other", files=["mp3"])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"files": ["WAV"]}, "files: .*\n  Write extensions: wav,flac"),
        ({"files": ["seg.png"]}, r"there is no \.seg\.png file in this folder"),
        ({"files": ["wav"], "sidecars": ["wav"]}, r"there is no \.wav file in this folder"),
    ],
)
def test_files_that_cannot_be_are_refused(tmp_path, options, problem):
    with pytest.raises(PackError, match=problem):
        pack(make_folder(tmp_path / "photos", {"cat": 1}), tmp_path / "out", **options)


def test_a_folder_without_images_says_how_its_files_are_packed(tmp_path):
    source = tmp_path / "arrays"
    (source / "a").mkdir(parents=True)
    for name in ("README", "a.npy"):
        (source / "a" / name).touch()
    with pytest.raises(PackError) as caught:
        pack(source, tmp_path / "out")
    assert str(caught.value).split("\n") == [
        f"{source}: there is no image in this folder; it has 2 other files, such as a.npy.",
        "  To pack those, add --files npy.",
    ]


# Cleaned keys.


def test_cleaned_keys_are_those_that_all_readers_take_and_are_counted(tmp_path):
    source = write(tmp_path / "photos", dict.fromkeys(["a b/22.05.jpg", "a b/plain.jpg", "ä/x.jpg"], image_bytes()))
    with pytest.raises(RowError, match="--keys clean"):
        pack(source, tmp_path / "out")
    result = pack(source, tmp_path / "out", keys="clean")
    found = {key: json.loads(fields["json"])["path"] for key, fields in samples_in(tmp_path / "out").items()}
    assert found == {"a_b/22_05": "a b/22.05.jpg", "a_b/plain": "a b/plain.jpg", "_/x": "ä/x.jpg"}
    assert result.num_cleaned == 3
    write(source, {"a.b/plain.jpg": image_bytes()})
    with pytest.raises(RowError, match=r"a.b/plain.jpg: its key .a_b/plain. is also the key of .*a b/plain.jpg"):
        pack(source, tmp_path / "twice", keys="clean")


@given(st.text(max_size=20))
def test_a_cleaned_key_is_plain_and_stays(key):
    cleaned = clean_key(key)
    assert cleaned == clean_key(cleaned)
    if cleaned:
        check_key(cleaned)
    if key.isascii() and key.replace("/", "").isalnum() and key.strip("/") == key and "//" not in key:
        assert cleaned == key


def test_the_key_that_was_given_stands_in_json(tmp_path):
    rows = [{"__key__": "a b", "cls": 1}, {"__key__": "c", "cls": 2, "json": {"n": 1}}]
    result = pack(rows, tmp_path / "out", keys="clean")
    assert result.num_cleaned == 1
    assert {key: fields["json"] for key, fields in samples_in(tmp_path / "out").items()} == {
        "a_b": b'{"key":"a b"}',
        "c": b'{"key":"c","n":1}',
    }
    (tmp_path / "m.csv").write_text("key,x\na b,1\n")
    pack(tmp_path / "m.csv", tmp_path / "table", keys="clean", allow_no_image=True)
    assert samples_in(tmp_path / "table") == {"a_b": {"json": b'{"key":"a b","x":"1"}'}}


@pytest.mark.parametrize(
    "names", [("images", "masks"), ("images", "labels"), ("JPEGImages", "SegmentationClass"), ("images",)]
)
def test_folders_of_parts_of_samples_are_not_taken_for_classes(tmp_path, names):
    for name in names:
        make_folder(tmp_path / "data", {name: 1})
    with pytest.raises(PackError, match=rf"the folder '{names[0]}' would become a class.*\n.*--sidecars seg.png"):
        pack(tmp_path / "data", tmp_path / "out")
    pack(tmp_path / "data", tmp_path / "out", classes=list(names))
    pack(tmp_path / "data" / names[0], tmp_path / "flat")


def test_a_sidecar_that_no_image_has_is_an_error(tmp_path):
    make_folder(tmp_path / "photos", {"cat": 2})
    (tmp_path / "photos" / "cat" / "0001.txt").write_text("x")
    with pytest.raises(
        PackError, match=r"sidecars: no image has a file .seg.png next to it. That of a.jpg is called a.seg"
    ):
        pack(tmp_path / "photos", tmp_path / "out", sidecars="txt,seg.png")
    assert not (tmp_path / "out").exists()
    pack(tmp_path / "photos", tmp_path / "out", sidecars="txt")


def test_a_sidecar_that_says_something_else_can_be_packed(tmp_path):
    make_folder(tmp_path / "photos", {"cat": 1})
    (tmp_path / "photos" / "cat" / "0000.json").write_text('{"path": "/old/1.jpg", "class": "tabby"}')
    with pytest.raises(
        RowError, match=r"it says 'path' is '/old/1.jpg', .*\n  To keep its 'path' and not add another: --omit path"
    ):
        pack(tmp_path / "photos", tmp_path / "out", sidecars="json")
    pack(tmp_path / "photos", tmp_path / "out", sidecars="json", omit="path,class")
    (sample,) = samples_in(tmp_path / "out").values()
    assert json.loads(sample["json"]) == {"cls": 0, "path": "/old/1.jpg", "class": "tabby"}
    with pytest.raises(PackError, match="omit: 'label' is not among the metadata of an image folder"):
        pack(tmp_path / "photos", tmp_path / "out", omit="label")


def test_a_folder_of_splits_proposes_to_begin_with_train(tmp_path):
    for name in ("test", "train"):
        make_folder(tmp_path / "data" / name, {"cat": 1})
    with pytest.raises(PackError, match=r"`wdskit pack .*data/train DEST`, the others then with `--classes DEST`"):
        pack(tmp_path / "data", tmp_path / "out")
