"""`pack` with options that change, check, describe or drop samples."""

from __future__ import annotations

import io
import json
import logging
import zipfile

import numpy as np
import pytest
from images import encoded, image_bytes, make_folder, photo
from PIL import Image
from shards import bytes_in, samples_in

from wdskit import PackError, RowError, pack


def photos(folder, number=11):
    for n in range(number):
        path = folder / f"{'ab'[n % 2]}" / f"{n:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(30 + n, 50 - n), "JPEG", quality=90))
    return folder


def opened(data):
    return Image.open(io.BytesIO(data))


TREATED = {"resize": 16, "format": "webp", "quality": 80, "derive": "width,height,bytes,sha256", "max_samples": 4}


def test_treated_samples_are_described_and_renamed(tmp_path):
    result = pack(photos(tmp_path / "photos"), tmp_path / "out", **TREATED)
    assert [entry.num_samples for entry in result.entries] == [4, 4, 3]
    assert {entry.fields for entry in result.entries} == {("cls", "json", "webp")}
    for sample in samples_in(tmp_path / "out").values():
        facts = json.loads(sample["json"])
        assert opened(sample["webp"]).size == (facts["width"], facts["height"])
        assert min(opened(sample["webp"]).size) == 16
        assert facts["bytes"] == len(sample["webp"])
        assert facts["path"].endswith(".jpg")


@pytest.mark.parametrize("more", [{"threads": 3}, {"workers": 2, "threads": 2}])
def test_threads_and_workers_change_no_byte(tmp_path, more):
    source = photos(tmp_path / "photos")
    pack(source, tmp_path / "one", pattern="p-%d.tar", shuffle=1, **TREATED)
    pack(source, tmp_path / "many", pattern="p-%d.tar", shuffle=1, **TREATED, **more)
    assert bytes_in(tmp_path / "one") == bytes_in(tmp_path / "many")


def test_rows_that_come_once_are_treated_too(tmp_path):
    rows = [{"__key__": f"{n}", "jpg": encoded(photo(30, 40 + n), "JPEG")} for n in range(7)]
    pack(rows, tmp_path / "list", pattern="p-%d.tar", **TREATED)
    pack(iter(rows), tmp_path / "stream", pattern="p-%d.tar", **TREATED)
    assert bytes_in(tmp_path / "list") == bytes_in(tmp_path / "stream")


def test_shards_of_unknown_size_go_by_count_alone(tmp_path):
    source = photos(tmp_path / "photos")
    for options in ({"resize": 16}, {"derive": "bytes"}):
        with pytest.raises(PackError, match="max_bytes: the sizes of changed samples are known too late"):
            pack(source, tmp_path / "out", max_bytes=100_000, **options)
    result = pack(source, tmp_path / "out", num_shards=3, resize=16)
    assert [entry.num_samples for entry in result.entries] == [4, 4, 3]
    assert pack(source, tmp_path / "plain", max_bytes=100_000, validate="decode").num_samples == 11


def test_a_dry_run_of_changed_samples_tells_no_bytes(tmp_path):
    result = pack(photos(tmp_path / "photos"), tmp_path / "out", dry_run=True, **TREATED)
    assert result.plan.num_fields == {"cls": 11, "json": 11, "webp": 11}
    assert [shard.num_bytes for shard in result.plan.shards] == [0] * 3
    assert result.plan.num_bytes == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_row_that_cannot_be_treated_is_an_error_or_rejected(tmp_path, workers):
    source = photos(tmp_path / "photos")
    transparent = np.zeros((9, 9, 4), np.uint8)
    (source / "a" / "clear.png").write_bytes(encoded(transparent, "PNG"))
    options = {"format": "jpg", "derive": "bytes", "max_samples": 6, "workers": workers}
    with pytest.raises(RowError, match=r"clear.png: png: convert: it is transparent"):
        pack(source, tmp_path / "out", **options)
    result = pack(source, tmp_path / "other", skip_bad=True, **options)
    assert [err.where for err in result.rejected] == [str(source / "a" / "clear.png")]
    assert result.num_samples == 11
    assert "png: convert: it is transparent" in (tmp_path / "other" / "rejected.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize(("level", "is_found"), [("none", False), ("magic", False), ("structure", True)])
def test_validate_is_how_much_is_looked_at(tmp_path, level, is_found):
    source = make_folder(tmp_path / "photos", {"cat": 2})
    (source / "cat" / "0001.jpg").write_bytes(image_bytes()[:-2])
    if is_found:
        with pytest.raises(RowError, match=r"0001.jpg: jpg: validate: JPEG, byte"):
            pack(source, tmp_path / "out", validate=level)
    else:
        assert pack(source, tmp_path / "out", validate=level).num_samples == 2


def test_upright_pixels_and_no_tag(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "x.jpg").write_bytes(encoded(photo(20, 30), "JPEG", exif=exif))
    pack(tmp_path / "photos", tmp_path / "out", orient=True)
    image = opened(samples_in(tmp_path / "out")["x"]["jpg"])
    assert image.size == (20, 30)
    assert 0x0112 not in image.getexif()


# Required fields.


def test_a_row_that_lacks_a_field_is_an_error_a_warning_or_left_out(tmp_path, caplog):
    rows = [
        {"__key__": "a", "jpg": image_bytes(), "json": {}},
        {"__key__": "b", "json": {}},
        {"__key__": "c", "cls": 1},
    ]
    with pytest.raises(RowError, match=r"row 1 \('b'\): it has no jpg or png; it has json") as caught:
        pack(rows, tmp_path / "error", require="jpg;png,json")
    assert caught.value.where == "row 1 ('b')"
    for source in (rows, iter(rows)):
        folder = tmp_path / f"skip {type(source).__name__}".replace(" ", "-")
        result = pack(source, folder, require="jpg;png,json", missing="skip")
        assert list(samples_in(folder)) == ["a"]
        assert [err.where for err in result.rejected] == ["row 1 ('b')", "row 2 ('c')"]
        assert len((folder / "rejected.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    with caplog.at_level(logging.WARNING):
        assert pack(rows, tmp_path / "warn", require="json", missing="warn").num_samples == 3
    assert [record.message for record in caplog.records] == ["row 2 ('c'): it has no json; it has cls."]
    assert pack(rows, tmp_path / "bad", require="json", skip_bad=True).num_samples == 2


@pytest.mark.parametrize("missing", [None, "skip"])
def test_a_json_field_that_cannot_be_read_is_a_bad_row_of_a_required_path(tmp_path, missing):
    with zipfile.ZipFile(tmp_path / "s.zip", "w") as file:
        for name in "abc":
            file.writestr(f"{name}.jpg", image_bytes())
            file.writestr(f"{name}.json", json.dumps({"caption": f"this is {name}"}))
    data = (tmp_path / "s.zip").read_bytes()
    (tmp_path / "s.zip").write_bytes(data.replace(b"this is b", b"this is x"))
    options = {"require": "json.caption", "missing": missing}
    with pytest.raises(RowError, match=r"CRC"):
        pack(tmp_path / "s.zip", tmp_path / "error", **options)
    result = pack(tmp_path / "s.zip", tmp_path / "out", skip_bad=True, **options)
    assert list(samples_in(tmp_path / "out")) == ["a", "c"]
    assert len(result.rejected) == 1


def test_required_are_the_names_that_fields_have_in_the_shards(tmp_path):
    rows = [{"__key__": "a", "jpg": image_bytes()}]
    pack(rows, tmp_path / "out", require="webp,json", format="webp", derive="width")
    with pytest.raises(RowError, match="it has no jpg; it has webp"):
        pack(rows, tmp_path / "other", require="jpg", format="webp")
    pack(rows, tmp_path / "derived", require="json.width", derive="width")
    with pytest.raises(RowError, match=r"it has no json\.height; it has jpg, json"):
        pack(rows, tmp_path / "other", require="json.height", derive="width")


@pytest.mark.parametrize("missing", ["error", "skip", "warn"])
def test_a_required_image_that_gets_the_name_of_its_format_is_refused(tmp_path, missing):
    """A PNG that is named jpg is packed as png when it is resized."""
    rows = [{"__key__": "a", "jpg": image_bytes("PNG")}, {"__key__": "b", "jpg": image_bytes()}]
    options = {"require": "jpg", "missing": missing, "resize": 8}
    if missing == "warn":
        pack(rows, tmp_path / "out", **options)
        return
    with pytest.raises(RowError, match="it has no jpg, because images are named after their format: it has png"):
        pack(rows, tmp_path / "out", **options)
    pack(rows, tmp_path / "out", **options, skip_bad=True)
    assert list(samples_in(tmp_path / "out")) == ["b"]
    pack(rows, tmp_path / "both", **{**options, "require": "jpg;png"})


def test_many_warnings_are_one(tmp_path, caplog):
    rows = [{"__key__": f"{n}", "cls": n} for n in range(50)]
    with caplog.at_level(logging.WARNING):
        pack(rows, tmp_path / "out", require="jpg", missing="warn")
    assert len(caplog.records) == 6
    assert caplog.records[-1].message == "50 rows in total lack a required field."


# Duplicates.


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_duplicates_are_reported_or_dropped_and_the_first_one_stays(tmp_path, workers, skip_bad):
    source = make_folder(tmp_path / "photos", {"a": 3, "b": 3}, kind="PNG", suffix=".png")
    (source / "b" / "0001.png").write_bytes((source / "a" / "0002.png").read_bytes())
    (source / "b" / "0002.png").write_bytes((source / "a" / "0002.png").read_bytes())
    options = {"workers": workers, "skip_bad": skip_bad, "shuffle": 7}
    expected = [{"key": f"b/000{n}", "where": str(source / "b" / f"000{n}.png"), "first_key": "a/0002"} for n in (1, 2)]
    for what, number in (("keep", 6), ("report", 6), ("drop", 4)):
        result = pack(source, tmp_path / what, duplicates=what, **options)
        assert result.num_samples == number
        assert len(result.duplicates) == (0 if what == "keep" else 2)
        assert (tmp_path / what / "duplicates.jsonl").exists() == (what != "keep")
    for what in ("report", "drop"):
        lines = (tmp_path / what / "duplicates.jsonl").read_text(encoding="utf-8").splitlines()
        assert [{name: json.loads(line)[name] for name in expected[0]} for line in lines] == expected
    assert "a/0002" in samples_in(tmp_path / "drop")


def test_dropped_rows_are_not_in_the_plan(tmp_path):
    rows = [{"__key__": f"{n}", "jpg": image_bytes(number=n % 3), "cls": n} for n in range(9)]
    result = pack(rows, tmp_path / "out", duplicates="drop", dry_run=True)
    assert result.plan.num_samples == 3
    assert result.plan.num_fields == {"cls": 3, "jpg": 3}
    assert [one.first_key for one in result.duplicates] == ["0", "1", "2"] * 2


def test_a_bad_row_is_no_first_one(tmp_path):
    bad = image_bytes()[:-2]
    rows = [{"__key__": "a", "jpg": bad}, {"__key__": "b", "jpg": bad}, {"__key__": "c", "jpg": image_bytes()}]
    result = pack(rows, tmp_path / "out", duplicates="drop", skip_bad=True)
    assert result.duplicates == ()
    assert len(result.rejected) == 2


def test_rows_that_come_once_have_no_pass_that_finds_duplicates(tmp_path):
    with pytest.raises(PackError, match="duplicates: rows that can be read only once"):
        pack(iter([{"__key__": "a", "cls": 1}]), tmp_path / "out", duplicates="drop")


@pytest.mark.parametrize("threads", [0, -1, "2", 1.5, True])
def test_threads_are_a_number(tmp_path, threads):
    with pytest.raises(PackError, match=r"threads: .* is not a number of threads"):
        pack([{"__key__": "a", "cls": 1}], tmp_path / "out", threads=threads)
