"""Parts of images that decoding ignores, the EXIF orientation and further frames, are counted and reported."""

from __future__ import annotations

import pytest
from images import encoded, pixels
from PIL import Image

from wdskit import pack
from wdskit.codecs.ignored_parts import find_unused

FRAMES = [Image.fromarray(pixels(8, 9, 3)), Image.fromarray(255 - pixels(8, 9, 3))]
MANY = {"save_all": True, "append_images": FRAMES[1:]}
TURNED = Image.Exif()
TURNED[0x0112] = 6
UPRIGHT = Image.Exif()
UPRIGHT[0x0112] = 1


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP"])
def test_the_orientation_of_every_kind_of_file_is_found(fmt):
    assert find_unused(encoded(FRAMES[0], fmt, exif=TURNED)) == ("orientation",)
    assert find_unused(encoded(FRAMES[0], fmt, exif=UPRIGHT)) == ()
    assert find_unused(encoded(FRAMES[0], fmt)) == ()


@pytest.mark.parametrize(
    ("fmt", "options"), [("GIF", {}), ("PNG", {}), ("WEBP", {}), ("TIFF", {}), ("TIFF", {"big_tiff": True})]
)
def test_the_frames_of_every_kind_of_file_are_found(fmt, options):
    assert find_unused(encoded(FRAMES[0], fmt, **MANY, **options)) == ("frames",)
    assert find_unused(encoded(FRAMES[0], fmt, **options)) == ()


def test_a_file_may_have_both():
    assert find_unused(encoded(FRAMES[0], "WEBP", exif=TURNED, **MANY)) == ("orientation", "frames")


@pytest.mark.parametrize("fmt", ["GIF", "TIFF"])
def test_a_file_that_is_cut_short_is_no_error_here(fmt):
    """The check of these parts does not read to the end of the file."""
    data = encoded(FRAMES[0], fmt, **MANY)
    for stop in range(13, len(data), 7):
        assert find_unused(data[:stop]) in {(), ("frames",)}


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(6):
        exif = {"exif": TURNED} if number in {2, 3, 5} else {}
        (folder / f"{number}.jpg").write_bytes(encoded(FRAMES[0], "JPEG", **exif))
    (folder / "6.gif").write_bytes(encoded(FRAMES[0], "GIF", **MANY))
    return folder


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"threads": 2}, {"validate": "decode"}], ids=str)
def test_pack_counts_images_whose_orientation_or_frames_decoding_ignores(photos, tmp_path, options):
    turned, animated = pack(photos, tmp_path / "out", max_samples=3, **options).notes
    assert turned.startswith(f"3 images with an EXIF orientation, first {photos / '2.jpg'}. ")
    assert turned.endswith("Decoding ignores it; `--orient` turns the pixels while packing.")
    first = photos / "6.gif"
    assert animated == f"1 image with more than one frame, first {first}. Decoding uses the first frame only."


@pytest.mark.parametrize("validate", ["none", "magic"])
def test_pack_does_not_look_for_them_where_it_reads_no_structure(photos, tmp_path, validate):
    assert pack(photos, tmp_path / "out", validate=validate).notes == ()


def test_pack_with_orient_turns_the_pixels_and_has_nothing_to_say(photos, tmp_path):
    (photos / "6.gif").unlink()
    assert pack(photos, tmp_path / "out", orient=True).notes == ()


def test_rows_from_python_are_counted_too(tmp_path):
    rows = [{"__key__": "a", "jpg": encoded(FRAMES[0], "JPEG", exif=TURNED)}]
    [note] = pack(iter(rows), tmp_path / "out").notes
    assert note.startswith("1 image with an EXIF orientation, first row 0")


def test_the_command_prints_one_line_for_all_images(photos, tmp_path, run):
    code, out, _ = run("pack", str(photos), str(tmp_path / "out"))
    assert code == 0
    assert out.count("EXIF") == 1
    assert "Note: 3 images with an EXIF orientation" in out
