"""Changes of a sample during packing: options, validation, names of fields, derived members of its JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from images import FILES, encoded, image_bytes, photo
from PIL import Image

from wdskit.codecs import checks
from wdskit.codecs.checks import IMAGE_LEVELS
from wdskit.errors import DecodeError, ImageTooLarge, PackError, RowError
from wdskit.packing.fill import read_transformed
from wdskit.packing.json_merge import add_metadata
from wdskit.packing.row import Row, file_bytes
from wdskit.packing.transforms import DERIVED, UNTOUCHED, Transforms, transform_versions

JPEG, PNG, WEBP = FILES["jpeg"], FILES["png"], FILES["webp"]


def opened(data):
    return Image.open(io.BytesIO(data))


# Options.


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"validate": "deep"}, "validate: 'deep' is not one of none, magic, structure, decode"),
        ({"resize": 0}, "resize: 0 is not a whole number of 1 to 65536"),
        ({"resize": 70_000}, "resize: 70000 is not a whole number"),
        ({"resize": "256"}, "resize: '256' is not a whole number"),
        ({"resize": True}, "resize: True is not a whole number"),
        ({"resize": 2.5}, "resize: 2.5 is not a whole number"),
        ({"resize": 8, "resize_mode": "fit"}, "resize_mode: 'fit' is not one of shorter, longer, crop, pad"),
        ({"format": "jpeg"}, "format: 'jpeg' is not one of jpg, webp, png"),
        ({"format": "jpg", "quality": 101}, "quality: 101 is not a whole number of 1 to 100"),
        ({"format": "jpg", "quality": 0}, "quality: 0 is not a whole number of 1 to 100"),
        ({"format": "jpg", "background": "blurple"}, "background: 'blurple' is not a colour"),
        ({"format": "jpg", "background": "#00000000"}, "background: '#00000000' is not a colour"),
        ({"format": "jpg", "background": 5}, "background: 5 is not a colour"),
        ({"derive": "width,depth"}, "derive: 'depth' is not one of width, height, bytes, sha256"),
        ({"derive": ""}, "derive: '' is not a list of names"),
        ({"derive": ("width", 5)}, "derive: .* is not a list of names"),
        ({"derive": "width,width"}, "derive: 'width,width' repeats a name"),
        ({"require": "jpg,"}, "require: 'jpg,' is not a list of names"),
        ({"require": "jpg", "missing": "ignore"}, "missing: 'ignore' is not one of error, warn, skip"),
        ({"duplicates": "remove"}, "duplicates: 'remove' is not one of keep, report, drop"),
        ({"max_pixels": 0}, "max_pixels: 0 is not a whole number"),
        ({"resize_mode": "crop"}, "resize_mode: it has no effect without resize"),
        ({"upscale": True}, "upscale: it has no effect without resize"),
        ({"quality": 90}, "quality: it has no effect without resize, format or orient"),
        ({"quality": 90, "format": "png"}, "quality: it has no effect .* or for png"),
        ({"background": "white"}, "background: it has no effect without format jpg or resize_mode pad"),
        ({"background": "white", "format": "webp"}, "background: it has no effect"),
        ({"image_fields": "jpg"}, "image_fields: it has no effect"),
        ({"missing": "skip"}, "missing: it has no effect without require"),
    ],
)
def test_options_that_are_wrong_or_change_nothing_are_refused_by_name(options, problem):
    with pytest.raises(PackError, match=f"^{problem}"):
        Transforms(**options)


def test_texts_and_lists_are_one():
    a = Transforms(derive="width, Height", require="jpg;png,json", resize=5, image_fields="left.jpg")
    b = Transforms(derive=("width", "height"), require=["jpg;png", "json"], resize=5, image_fields=["left.jpg"])
    assert a == b
    assert hash(a) == hash(b)
    assert a.derive == ("width", "height")


def test_a_treatment_goes_to_another_process_as_it_is():
    transforms = Transforms(resize=5, format="webp", derive="sha256", background=None)
    transforms.apply([("jpg", JPEG)])
    again = pickle.loads(pickle.dumps(transforms))
    assert again == transforms
    assert again.apply([("jpg", JPEG)]) == transforms.apply([("jpg", JPEG)])


def test_what_changes_bytes_says_so():
    assert not UNTOUCHED.changes_bytes
    assert not Transforms(validate="decode", require="jpg", duplicates="drop").changes_bytes
    for options in ({"resize": 5}, {"format": "jpg"}, {"orient": True}, {"derive": "bytes"}):
        assert Transforms(**options).changes_bytes


def test_versions_are_those_of_what_makes_the_bytes():
    assert transform_versions(Transforms(derive="sha256")) == {}
    encoders = transform_versions(Transforms(format="png"))
    assert {"pillow", "simplejpeg", "libjpeg_turbo", "webp"} < set(encoders)
    assert transform_versions(Transforms(resize=5)).keys() - encoders.keys() == {"torch", "torch_cpu"}
    assert all(transform_versions(Transforms(resize=5)).values())
    json.dumps(encoders)


# Untouched samples.


def test_by_default_bytes_pass_through_and_images_are_checked():
    fields = [("bin", b"\0"), ("jpg", JPEG), ("json", b' {"a": 1.10}'), ("left.png", PNG)]
    assert UNTOUCHED.apply(fields) == fields
    with pytest.raises(DecodeError, match=r"^JPEG, byte"):
        UNTOUCHED.apply([("jpg", JPEG[:-2])])
    with pytest.raises(DecodeError, match=r"^the name says JPEG, but it is a PNG file"):
        UNTOUCHED.apply([("jpg", PNG)])
    for fields in ([("meta.json", b"no json")], [("jpg", PNG), ("json", b"{")]):
        with pytest.raises(DecodeError):
            UNTOUCHED.apply(fields)
        assert Transforms(validate="none").apply(fields) == fields


# Validation.

FLIPPED = PNG[:45] + bytes([PNG[45] ^ 1]) + PNG[46:]
SHORT_RIFF = WEBP[:4] + (len(WEBP) + 9).to_bytes(4, "little") + WEBP[8:]
PIXELS_CUT = JPEG[: JPEG.index(b"\xff\xda") + 30] + b"\xff\xd9"
DAMAGE = {
    "another format": ("jpg", PNG, "magic"),
    "no image": ("jpg", b"<html>", "magic"),
    "empty": ("png", b"", "magic"),
    "jpeg without its end": ("jpg", JPEG[:-2], "structure"),
    "jpeg cut": ("jpg", JPEG[: len(JPEG) // 2], "structure"),
    "png flipped": ("png", FLIPPED, "structure"),
    "png cut": ("png", PNG[:-5], "structure"),
    "webp longer than its file": ("webp", SHORT_RIFF, "structure"),
    "webp cut": ("webp", WEBP[:-10], "structure"),
    "jpeg without most pixels": ("jpg", PIXELS_CUT, "decode"),
    "gif cut": ("gif", FILES["gif"][:-12], "decode"),
}


@pytest.mark.parametrize("level", IMAGE_LEVELS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_at_its_level_and_above(damage, level):
    field, data, found_at = DAMAGE[damage]
    transforms = Transforms(validate=level)
    if IMAGE_LEVELS.index(level) < IMAGE_LEVELS.index(found_at):
        assert transforms.apply([(field, data)]) == [(field, data)]
    else:
        with pytest.raises(DecodeError, match=f"^{field}: validate: ") as caught:
            transforms.apply([(field, data)])
        assert caught.value.field == field


@pytest.mark.parametrize("level", IMAGE_LEVELS)
def test_whole_files_pass_every_level(level):
    for kind, data in FILES.items():
        field = {"jpeg": "jpg"}.get(kind.split()[0], kind.split()[0])
        assert Transforms(validate=level).apply([(field, data)]) == [(field, data)]


@pytest.mark.parametrize(
    ("skipped", "damage"),
    [("check_magic", "another format"), ("check_image", "png flipped"), ("decode_image", "jpeg without most pixels")],
)
def test_a_mutant_that_leaves_a_level_out_lets_its_damage_through(monkeypatch, skipped, damage):
    monkeypatch.setattr(checks, skipped, lambda *_args, **_options: None)
    field, data, _ = DAMAGE[damage]
    assert Transforms(validate="decode" if skipped == "decode_image" else "structure").apply([(field, data)])


@pytest.mark.parametrize("options", [{}, {"validate": "structure"}, {"validate": "decode"}, {"resize": 2}])
def test_more_pixels_than_allowed_are_refused(options):
    with pytest.raises(ImageTooLarge, match=r"21.*= 714 pixels|34 x 21"):
        Transforms(max_pixels=713, **options).apply([("jpg", JPEG)])
    assert Transforms(max_pixels=714, **options).apply([("jpg", JPEG)])


# Names.


@pytest.mark.parametrize(
    ("field", "data", "options", "name"),
    [
        ("jpg", JPEG, {"format": "webp"}, "webp"),
        ("left.jpg", JPEG, {"format": "webp"}, "left.webp"),
        ("a.b.jpg", JPEG, {"format": "png"}, "a.b.png"),
        ("jpe", JPEG, {"format": "jpg"}, "jpg"),
        ("left.jfif", JPEG, {"format": "jpg"}, "left.jpg"),
        ("apng", PNG, {"format": "png"}, "png"),
        ("tiff", FILES["tiff"], {"format": "png"}, "png"),
        ("jpe", JPEG, {"resize": 5}, "jpe"),
        ("jpg", PNG, {"format": "png"}, "png"),
        ("jpg", PNG, {"resize": 2}, "png"),
        ("png", JPEG, {"format": "jpg", "resize": 5}, "jpg"),
        ("gif", FILES["gif"], {"resize": 99}, "gif"),
        ("bmp", FILES["bmp"], {"format": "png"}, "png"),
    ],
)
def test_the_field_is_named_after_what_is_written(field, data, options, name):
    transforms = Transforms(**options)
    [(made, image)] = transforms.apply([(field, data)])
    assert made == name
    assert "format" not in options or transforms.field_names([field]) == (name,)
    assert opened(image).format == {"jpe": "JPEG", "jpg": "JPEG"}.get(name[-3:], name.rpartition(".")[2].upper())


def test_a_field_in_the_way_is_an_error():
    for fields in ([("jpg", JPEG), ("webp", b"x")], [("jpg", JPEG), ("webp", WEBP)]):
        with pytest.raises(DecodeError, match="encode: it would become 'webp', which the sample already has"):
            Transforms(validate="none", format="webp", image_fields="jpg").apply(fields)
    with pytest.raises(DecodeError, match="it would become 'webp', which the sample already has"):
        Transforms(format="webp", image_fields="jpg,png").apply([("jpg", JPEG), ("png", PNG)])


def test_of_several_images_those_to_change_are_named():
    """A mask next to a photo must not be blended, so wdskit does not guess."""
    fields = [("jpg", JPEG), ("json", b"{}"), ("seg.png", PNG)]
    with pytest.raises(DecodeError, match=r"it has 2 images \(jpg, seg.png\). Choose with --image-fields jpg"):
        Transforms(resize=2).apply(fields)
    made = dict(Transforms(resize=2, image_fields="jpg").apply(fields))
    assert made["seg.png"] == PNG
    assert opened(made["jpg"]).size == (3, 2)
    made = dict(Transforms(resize=2, image_fields="jpg,seg.png").apply(fields))
    assert opened(made["seg.png"]).size == (3, 2)


def test_fields_come_sorted_by_their_names():
    made = Transforms(format="webp", derive="width").apply([("cls", b"1"), ("jpg", JPEG), ("txt", b"x")])
    assert [field for field, _ in made] == ["cls", "json", "txt", "webp"]


def test_names_are_known_before_a_row_is_read_where_the_format_is():
    names = Transforms(format="webp", derive="width").field_names(("cls", "left.jpg"))
    assert names == ("cls", "json", "left.webp")
    assert UNTOUCHED.field_names(("a", "b.jpg", "c.jpg")) == ("a", "b.jpg", "c.jpg")
    assert Transforms(derive="width").field_names(("txt",)) == ("txt",)


def test_what_lacks_is_named_as_it_was_asked_for():
    transforms = Transforms(require="jpg;png,json")
    assert transforms.lacks(("PNG", "json", "txt")) is None
    assert transforms.lacks(("json",)) == "jpg;png"
    assert transforms.lacks(("jpg",)) == "json"
    assert UNTOUCHED.lacks(()) is None


# Derived members.


def test_facts_are_those_of_the_packed_image():
    made = dict(Transforms(resize=10, format="webp", derive=DERIVED).apply([("jpg", JPEG), ("json", b'{"a": 1.50}')]))
    facts = {"width": 16, "height": 10, "bytes": len(made["webp"]), "sha256": hashlib.sha256(made["webp"]).hexdigest()}
    assert json.loads(made["json"]) == {"a": 1.5, **facts}
    assert made["json"].startswith(b'{"a": 1.50,"width":16,')


def test_a_json_is_made_where_there_is_none_and_an_image_is():
    made = dict(Transforms(derive="height,width").apply([("jpg", JPEG), ("cls", b"1")]))
    assert made["json"] == b'{"width":34,"height":21}'
    assert Transforms(derive="width").apply([("cls", b"1")]) == [("cls", b"1")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"[1]", "it holds a list"),
        (b"5", "it holds a int"),
        (b'{"width": 33}', "it says 'width' is 33, but it is 34"),
        (b'{"width": "34"}', "it says 'width' is '34', but it is 34"),
        (b'{"width": 34.0}', "it says 'width' is 34.0, but it is 34"),
        (b'{"width": true}', "it says 'width' is True"),
    ],
)
def test_json_that_has_no_room_for_a_fact_is_an_error(text, problem):
    with pytest.raises(DecodeError, match=rf"^json: derive: .*{problem}"):
        Transforms(derive="width").apply([("jpg", JPEG), ("json", text)])


def test_the_same_fact_is_not_added_twice():
    text = b' {"width": 34} '
    assert dict(Transforms(derive="width").apply([("jpg", JPEG), ("json", text)]))["json"] == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@given(st.dictionaries(st.text(max_size=4), json_values, max_size=3), st.sampled_from([None, 0, 3]), st.booleans())
def test_what_a_json_had_stays_as_it_was_written(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass") + b" \n"
    made = add_metadata(text, {"width": 1, "sha256": "x"}, at_end=True)
    assert json.loads(made) == {**value, "width": 1, "sha256": "x"}
    assert made.startswith(text.rstrip()[:-1].rstrip())
    assert made.endswith(text[len(text.rstrip()[:-1].rstrip()) :])


def test_derived_facts_of_several_images_need_one_to_be_named():
    fields = [("a.jpg", JPEG), ("b.png", PNG)]
    with pytest.raises(DecodeError, match="it has 2 images"):
        Transforms(derive="width").apply(fields)
    assert b"7" in dict(Transforms(derive="width", image_fields="b.png").apply(fields))["json"]


# Rows, threads.


def rows_of(folder, number):
    folder.mkdir(exist_ok=True)
    rows = []
    for n in range(number):
        path = folder / f"{n}.jpg"
        path.write_bytes(encoded(photo(20 + n, 90 - n), "JPEG", quality=80 + n % 10))
        rows.append(Row(f"{n:03d}", (("jpg", file_bytes(str(path), str(path))),), str(path)))
    return rows


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_change_neither_bytes_nor_order(tmp_path, threads):
    rows = rows_of(tmp_path / "photos", 40)
    transforms = Transforms(resize=16, resize_mode="crop", derive="sha256")
    expected = [(row, row.read(transforms)) for row in rows]
    assert list(read_transformed(rows, transforms, threads=threads)) == expected


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_bad_row_in_order_is_the_one_that_is_told(tmp_path, threads):
    rows = rows_of(tmp_path / "photos", 12)
    for n in (5, 7):
        path = Path(rows[n].where)
        path.write_bytes(path.read_bytes()[:-300] + bytes(300))
        rows[n] = dataclasses.replace(rows[n], fields=(("jpg", file_bytes(str(path), str(path))),))
    transformed = read_transformed(rows, Transforms(validate="none", resize=5), threads=threads)
    assert [row for row, _ in (next(transformed) for _ in range(5))] == rows[:5]
    with pytest.raises(RowError, match=r"5\.jpg: jpg: decode: not one complete JPEG") as caught:
        next(transformed)
    assert caught.value.where == rows[5].where
    assert caught.value.problem.startswith("jpg: decode: ")


def test_rows_are_not_read_far_ahead(tmp_path):
    taken = []

    def rows():
        for row in rows_of(tmp_path / "photos", 20):
            taken.append(row)
            yield row

    transformed = read_transformed(rows(), Transforms(resize=5), threads=2)
    next(transformed)
    assert len(taken) == 4
    transformed.close()


def test_a_name_that_grows_over_the_limit_is_an_error_of_its_row():
    row = Row("a" * 96, (("jpg", image_bytes()),), "row 0")
    assert row.read()
    with pytest.raises(RowError, match=r"row 0: .*takes 101 bytes, more than the 100"):
        row.read(Transforms(format="webp"))
