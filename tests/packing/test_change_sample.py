"""Changes of samples: sizes and orientation of images, guards of what describes them, and functions of the user."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import HastyDisk, on
from formats import read_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from images import encoded, photo
from PIL import Image

import wdskit
from wdskit import DecodeError, PackError, RowError, pack
from wdskit.codecs.recode import recode_image
from wdskit.packing import change_sample
from wdskit.packing.change_sample import Change

MAX = 10**6
ORIENTATION = 0x0112
FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}
FLIPS = {1: (), 2: (0,), 3: (3,), 4: (1,), 5: (5,), 6: (4,), 7: (6,), 8: (2,)}


def open_image(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@settings(max_examples=80)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 40), st.integers(0, 9), st.sampled_from([*FORMATS]))
def test_the_shorter_side_is_shrunk_never_enlarged_and_the_image_is_upright(
    width: int, height: int, size: int, turn: int, fmt: Any
) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = turn
    image = Image.new("RGB", (width, height), (9, 99, 200))
    data = encoded(image, FORMATS[fmt], exif=exif, lossless=True)
    made, found_fmt = recode_image(data, size=size, fmt=fmt if turn % 2 else None, quality=1, max_pixels=MAX)
    found = open_image(made)
    wide, high = (height, width) if 5 <= turn <= 8 else (width, height)
    scale = min(1, size / min(wide, high))
    assert min(found.size) == min(wide, high, size)
    assert abs(found.width - wide * scale) <= 1
    assert abs(found.height - high * scale) <= 1
    assert found_fmt == fmt
    assert (made == data) == (scale == 1 and turn not in range(2, 9))  # an image that needs no change is copied
    assert found.getexif().get(ORIENTATION, 1) == 1 or made == data


@pytest.mark.parametrize("turn", range(1, 9))
def test_each_orientation_is_applied_as_pillow_applies_it(turn: int) -> None:
    image = Image.new("RGB", (3, 2))
    image.putdata([(n * 40, 0, 0) for n in range(6)])
    exif = Image.Exif()
    exif[ORIENTATION] = turn
    made, _ = recode_image(encoded(image, "PNG", exif=exif), size=None, fmt=None, quality=90, max_pixels=MAX)
    expected = image
    for way in FLIPS[turn]:
        expected = expected.transpose(Image.Transpose(way))
    assert np.array_equal(open_image(made).convert("RGB"), expected)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("mode", ["L", "RGB", "P", "1", "CMYK", "LA", "RGBA", "I;16"])
def test_any_image_is_written_in_any_format_or_refused_with_a_reason(mode: str, fmt: Any) -> None:
    """Transparency and more than 8 bits are never lost in silence, and a colour profile is of the file's colours."""
    image = Image.new("L", (9, 7), 77).convert("RGBA" if mode == "RGBA" else mode if mode != "I;16" else "I")
    if mode in {"LA", "RGBA"}:
        image.putalpha(100)
    colours = {"L": b"GRAY", "CMYK": b"CMYK"}.get(mode, b"RGB ")
    kind, image = "TIFF" if mode == "CMYK" else "PNG", image.convert("I;16") if mode == "I;16" else image
    data = encoded(image, kind, icc_profile=bytes(16) + colours)
    is_refused = (mode == "I;16" and fmt != "png") or (mode in {"LA", "RGBA"} and fmt == "jpg")
    if is_refused or (mode == "I;16"):
        with pytest.raises(DecodeError, match=r"8 bits|transparent"):
            recode_image(data, size=4, fmt=fmt, quality=90, max_pixels=MAX)
        return
    made, found = recode_image(data, size=4, fmt=fmt, quality=90, max_pixels=MAX)
    assert found == fmt
    assert min(open_image(made).size) == 4
    fits = colours == (b"GRAY" if open_image(made).mode == "L" else b"RGB ")
    assert open_image(made).info.get("icc_profile") == (bytes(16) + colours if fits else None)
    assert open_image(made).convert("RGBA").getpixel((1, 1))[3] == (100 if mode in {"LA", "RGBA"} else 255)


def test_quality_decides_the_bytes_of_new_jpg_and_webp() -> None:
    data = encoded(photo(40, 60), "PNG")
    for fmt in ("jpg", "webp"):
        sizes = [len(recode_image(data, size=30, fmt=fmt, quality=q, max_pixels=MAX)[0]) for q in (1, 50, 100)]
        assert sizes == sorted({*sizes})


# Guards.

NUMBERS = st.recursive(
    st.none() | st.booleans() | st.text(max_size=5) | st.integers() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def has_number(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return any(map(has_number, value.values() if isinstance(value, dict) else value))
    if isinstance(value, str):
        text = value.strip()
        try:
            return text.isascii() and "_" not in text and float(text) == float(text) and text[-1:].lower() not in "ynf"
        except ValueError:
            return False
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@given(NUMBERS)
def test_every_number_in_json_is_found_also_as_text_and_nothing_else(value: Any) -> None:
    assert change_sample.has_number(value) == has_number(value)


PNG = encoded(photo(8, 12), "PNG")


@pytest.mark.parametrize("how", [{"resize": 4}, {"format": "jpg"}])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"png": PNG, "json": b'{"x1": 3}'}, r"its json has numbers.*--keep-json"),
        ({"png": PNG, "a.json": b'["7"]'}, r"its a\.json has numbers"),
        ({"png": PNG, "seg.png": PNG}, r"it has 2 images \(png, seg\.png\)"),
        ({"png": PNG[:-30], "txt": b""}, "PNG, byte 33: the file stops"),
        ({"ppm": b"P6 9 9 65535\n" + bytes(486)}, "more than 8 bits per channel"),
        ({"webp": encoded(photo(8, 12), "WEBP", exif=b"Exif\0\0damaged!")}, "Pillow cannot read this WEBP image: "),
    ],
)
def test_a_changed_image_never_contradicts_the_rest_of_its_sample(how: Any, fields: Any, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        Change(**how).apply("k", dict(fields))
    text = {"json": b'{"caption": "two cats", "ok": true}', "png": PNG, "txt": b"3 cats"}
    assert Change(**how).apply("k", dict(text)).keys() >= {"json", "txt"}
    if message.startswith("its json"):
        assert Change(**how, keep_json=True).apply("k", dict(fields))["json"] == fields["json"]


def test_a_new_format_renames_the_field_and_takes_no_other_place() -> None:
    made = Change(format="jpg").apply("k", {"left.png": PNG, "txt": b"x"})
    assert [*made] == ["left.jpg", "txt"]
    assert open_image(made["left.jpg"]).format == "JPEG"
    assert [*Change(format="jpg").apply("k", {"txt": b"x"})] == ["txt"]
    with pytest.raises(DecodeError, match="not one complete JPEG image"):  # Pillow would paint the rest grey
        Change(format="png").apply("k", {"jpg": encoded(photo(80, 99), "JPEG")[:-400] + b"\xff\xd9"})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"resize": 0}, "resize: .*, not 0"), ({"resize": 70_000}, "resize"), ({"quality": 101}, "quality: .*, not 101"),
     ({"format": "gif"}, "format: .* 'webp' or 'png', not 'gif'"), ({"validate": "all"}, "validate: .*, not 'all'"),
     ({"num_shards": 1, "max_samples": 2}, "num_shards: it takes the place of max_samples and max_bytes"),
     ({"num_shards": 1, "max_bytes": 4096}, "num_shards: it takes the place of max_samples and max_bytes"),
     ({"resize": True}, "resize: .*, not True"), ({"max_sample": 3}, "max_sample: .*, not 3"),
     ({"map": lambda key, fields: fields}, "no `version`")],
)  # fmt: skip
def test_an_option_out_of_range_is_refused_with_its_value(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(PackError, match=message):
        pack([{"__key__": "a", "txt": "x"}], tmp_path / "d", **options)
    assert not (tmp_path / "d").exists()


# Functions of the user.


def lower(key: str, fields: dict[str, bytes]) -> dict[str, bytes]:
    return {**fields, "txt": fields["txt"].lower(), "n.cls": str(len(key)).encode()}


lower.version = "1"  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_map_changes_samples_in_this_process_and_in_workers(tmp_path: Path, workers: int) -> None:
    rows = [{"__key__": f"k{n}", "txt": "AB"} for n in range(6)]
    on(HastyDisk(), pack, rows, tmp_path / "d", map=lower, max_samples=2, workers=workers)
    assert read_folder(tmp_path / "d") == {f"k{n}": {"n.cls": b"2", "txt": b"ab"} for n in range(6)}


def test_another_version_of_a_map_is_another_run(tmp_path: Path) -> None:
    def shout(key: str, fields: dict[str, bytes]) -> dict[str, bytes]:
        return {"txt": fields["txt"].upper()}

    rows = [{"__key__": "a", "txt": "x"}]
    shout.version = "1"  # type: ignore[attr-defined]
    on(HastyDisk(), pack, rows, tmp_path / "d", map=shout)
    assert on(HastyDisk(), pack, rows, tmp_path / "d", map=shout).was_done
    shout.version = "2"  # type: ignore[attr-defined]
    with pytest.raises(PackError, match="another data set"):
        on(HastyDisk(), pack, rows, tmp_path / "d", map=shout)


@pytest.mark.parametrize(
    "made", [None, {}, {"txt": "text"}, [("txt", b"")], {"json": b"{"}, {1: b"x"}, {"A B": b"x"}, {"txt": b"\xff"}]
)
def test_what_a_map_must_not_return_is_an_error_of_its_row(tmp_path: Path, made: Any) -> None:
    def wrong(key: str, fields: dict[str, bytes]) -> Any:
        return made if key == "k1" else fields

    wrong.version = "1"  # type: ignore[attr-defined]
    rows = [{"__key__": f"k{n}", "txt": "x"} for n in range(3)]
    with pytest.raises(RowError, match=r"^row 1 \('k1'\): "):
        on(HastyDisk(), pack, rows, tmp_path / "d", map=wrong)
    on(HastyDisk(), pack, rows, tmp_path / "d", map=wrong, skip_bad=True)
    assert [*read_folder(tmp_path / "d")] == ["k0", "k2"]


def test_resize_comes_before_the_map(tmp_path: Path) -> None:
    def note_size(key: str, fields: dict[str, bytes]) -> dict[str, bytes]:
        return {**fields, "json": json.dumps({"size": open_image(fields["png"]).size}).encode()}

    note_size.version = "1"  # type: ignore[attr-defined]
    result = on(HastyDisk(), pack, [{"__key__": "a", "png": PNG}], tmp_path / "d", resize=4, map=note_size)
    found = read_folder(tmp_path / "d")["a"]
    assert (json.loads(found["json"])["size"], result.fields) == ([*open_image(found["png"]).size], ("json", "png"))
    assert wdskit.verify(tmp_path / "d").is_clean
