"""Masks: a batch has the numbers stored in the file, for any changes of the images next to the mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formats import png_of
from images import encoded, photo
from numpy.typing import NDArray
from PIL import Image
from shards import write_shard

from wdskit import Pipeline, pack
from wdskit.codecs.images import decode_index
from wdskit.errors import DecodeError, ImageTooLarge, SampleError
from wdskit.shards.index import index_folder

LIMIT = 10**6
NUMBERS = np.random.default_rng(3).integers(0, 1 << 16, (21, 34))


def grey_png(numbers: NDArray[Any], bits: int) -> bytes:
    """Return numbers of 1 to 16 bits as a PNG; Pillow writes only 8 and 16 bits."""
    rows = b""
    for row in numbers:
        text = "".join(f"{number:0{bits}b}" for number in row)
        text += "0" * (-len(text) % 8)
        rows += b"\0" + int(text, 2).to_bytes(len(text) // 8, "big")
    return png_of(rows, *numbers.shape[::-1], bits=bits, colour=0)


def palette_image(numbers: NDArray[Any]) -> Image.Image:
    image = Image.frombytes("P", numbers.shape[::-1], numbers.astype(np.uint8).tobytes())
    image.putpalette(np.random.default_rng(4).integers(0, 256, 768, dtype=np.uint8).tobytes())
    return image


def masks() -> dict[str, tuple[bytes, NDArray[Any]]]:
    """Return files, and the numbers that they store."""
    found = {
        f"png {bits} bits": (grey_png(NUMBERS % (1 << bits), bits), NUMBERS % (1 << bits)) for bits in (1, 2, 4, 8)
    }
    found["png 16 bits"] = grey_png(NUMBERS, 16), NUMBERS
    for bits in (1, 2, 4, 8):
        found[f"png palette {bits} bits"] = (
            encoded(palette_image(NUMBERS % (1 << bits)), "PNG", bits=bits),
            NUMBERS % (1 << bits),
        )
    transparent = encoded(palette_image(NUMBERS % 256), "PNG", transparency=3)
    found["png palette, one transparent"] = transparent, NUMBERS % 256
    for kind in ("GIF", "BMP", "TIFF"):
        options = {"optimize": False} if kind == "GIF" else {}  # otherwise it stores other numbers
        found[f"{kind} palette"] = encoded(palette_image(NUMBERS % 256), kind, **options), NUMBERS % 256
    for kind in ("BMP", "TIFF", "PPM"):
        found[f"{kind} 8 bits"] = encoded((NUMBERS % 256).astype(np.uint8), kind), NUMBERS % 256
    for kind in ("TIFF", "PPM"):
        found[f"{kind} 16 bits"] = encoded(NUMBERS.astype(np.uint16), kind), NUMBERS
    return found


MASKS = masks()


@pytest.mark.parametrize("name", MASKS)
def test_index_gives_the_numbers_that_a_file_stores(name):
    data, numbers = MASKS[name]
    found = decode_index(data, max_pixels=LIMIT)
    assert found.dtype == np.int32
    assert np.array_equal(found, numbers)
    assert found.flags.c_contiguous
    assert found.flags.writeable
    with pytest.raises(ImageTooLarge):
        decode_index(data, max_pixels=20)
    with pytest.raises(DecodeError):
        decode_index(data[: len(data) // 2], max_pixels=LIMIT)


def test_index_of_grey_jpeg_is_its_grey():
    grey = np.asarray(Image.fromarray(photo()).convert("L"))
    found = decode_index(encoded(grey, "JPEG", quality=95), max_pixels=LIMIT)
    assert np.abs(found.astype(int) - grey).max() < 9


@pytest.mark.parametrize(
    "data",
    [
        encoded(photo(), "PNG"),
        encoded(photo(), "JPEG"),
        encoded(photo(), "WEBP"),
        encoded(Image.fromarray(photo()).convert("LA"), "PNG"),
        b"P5\n2 2\n15\n\1\2\3\4",
        b"P4\n8 1\n\1",
    ],
    ids=["png", "jpeg", "webp", "grey and alpha", "pgm to 15", "pbm"],
)
def test_index_of_an_image_without_one_plain_number_a_pixel_is_an_error(data):
    with pytest.raises(DecodeError, match="does not store one number per pixel"):
        decode_index(data, max_pixels=LIMIT)


def write_masks(folder: Path, data: bytes, count: int = 4) -> str:
    folder.mkdir()
    fields = {"jpg": encoded(photo(), "JPEG"), "seg.png": data}
    write_shard(folder / "m.tar", {f"k{number}": fields for number in range(count)})
    index_folder(folder, workers=1)
    return str(folder)


def sources(folder: str) -> list[Pipeline]:
    return [Pipeline().exact(folder, seed=1), Pipeline().stream(folder, seed=1)]


def crop(pipe: Pipeline) -> Pipeline:
    return pipe.random_resized_crop([9, 12], masks="seg.png").random_flip(masks="seg.png")


@pytest.mark.parametrize("source", [0, 1], ids=["exact", "stream"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_decoded_by_index_keep_their_numbers_through_crops_and_batches(tmp_path, name, source):
    data, numbers = MASKS[name]
    folder = write_masks(tmp_path / "m", data)
    pipe = crop(sources(folder)[source].decode("index", only="seg.png").decode("rgb8"))
    ((images, found),) = pipe.to_tuple("jpg", "seg.png").batched(4).loader(workers=0)
    assert images.shape == (4, 3, 9, 12)
    assert found.shape == (4, 1, 9, 12)
    assert found.dtype == torch.int32
    assert set(found.unique().tolist()) <= set(np.unique(numbers).tolist())
    flat = sources(folder)[source].decode("index", only="seg.png").to_tuple("seg.png").batched(4)
    assert np.array_equal(next(iter(flat.loader(workers=0)))[0][0, 0].numpy(), numbers)


@pytest.mark.parametrize("new", ["seg.png", "mask", "mask.png"])
def test_what_index_decoded_is_taken_for_no_colour_by_any_name(tmp_path, new):
    folder = write_masks(tmp_path / "m", encoded(palette_image(NUMBERS % 2), "PNG"))
    for base in sources(folder):
        pipe = base.decode("index", only="seg.png").decode("rgb8")
        pipe = pipe if new == "seg.png" else pipe.rename(**{new: "seg.png"})
        for stage in (pipe.normalize("imagenet", fields=new), pipe.to_tensor(fields=new)):
            with pytest.raises(SampleError, match=f"`{new}` is a mask"):
                list(stage.loader(workers=0))


def test_a_mask_smaller_than_the_crop_is_padded_with_a_number_that_was_chosen(tmp_path):
    folder = write_masks(tmp_path / "m", encoded((NUMBERS % 7 + 1).astype(np.uint8), "PNG"))
    base = Pipeline().exact(folder).decode("index", only="seg.png").decode("rgb8")
    with pytest.raises(SampleError, match=r"21 x 34 is smaller than 25 x 30. Resize it first, or set `mask_fill`"):
        list(base.center_crop([25, 30], fields="jpg", masks="seg.png").loader(workers=0))
    for sample in base.center_crop([25, 30], fields="jpg", masks="seg.png", mask_fill=255).loader(workers=0):
        mask = np.asarray(sample["seg.png"])
        assert np.array_equal(mask[2:23], (NUMBERS % 7 + 1)[:, 2:32])
        assert {*np.unique(mask[:2]), *np.unique(mask[23:])} == {255}
        assert not sample["jpg"][:2].any()
    within = base.center_crop([9, 8], fields="jpg", masks="seg.png").loader(workers=0)
    assert np.asarray(next(iter(within))["seg.png"]).shape == (9, 8)
    small = base.map_dict(**{"seg.png": lambda mask: mask.astype(np.uint8)})
    with pytest.raises(SampleError, match="set `mask_fill`, the class number around it, which uint8 can store"):
        list(small.center_crop(40, fields="jpg", masks="seg.png", mask_fill=300).loader(workers=0))


def test_a_mask_of_floats_keeps_any_fill(tmp_path):
    """A depth map is not limited to 0..1."""
    depth = np.full((21, 34), 7.5, dtype=np.float32)
    pack([{"__key__": "a", "png": encoded(NUMBERS.astype(np.uint8), "PNG"), "npy": depth}], tmp_path / "d")
    pipe = (
        Pipeline().exact(str(tmp_path / "d")).decode("rgb8").center_crop(40, fields="png", masks="npy", mask_fill=255)
    )
    [sample] = pipe.loader(workers=0)
    assert set(np.unique(sample["npy"])) == {7.5, 255}


def test_a_mask_of_another_size_than_its_image_is_refused_where_the_place_depends_on_the_size(tmp_path):
    half = encoded((NUMBERS[:10, :17] % 9).astype(np.uint8), "PNG")
    image = encoded(NUMBERS.astype(np.uint8), "PNG")
    pack([{"__key__": "a", "png": image, "seg.png": half}], tmp_path / "d", columns="width=png.width,height=png.height")
    base = Pipeline().exact(str(tmp_path / "d")).decode("index", only="seg.png").decode("rgb8")
    names = {"fields": "png", "masks": "seg.png"}
    told = r"the mask `seg.png` has the height and width \(10, 17\), but the images have {'png': \(21, 34\)}"
    for pipe in (
        base.center_crop(8, **names),
        base.center_crop(30, mask_fill=255, **names),
        base.resize_to_bucket(**names).bucketed(by="aspect", shapes=[[8, 8]], global_size=1),
    ):
        with pytest.raises(SampleError, match=told):
            list(pipe.loader(workers=0))
    for size in (8, 11, 14):  # the longer side of each is rounded by itself
        [sample] = base.resize(size, **names).center_crop(8, **names).loader(workers=0)
        assert sample["seg.png"].shape[:2] == sample["png"].shape[:2] == (8, 8)
    [sample] = base.resize([21, 34], **names).center_crop(8, **names).random_flip(**names).loader(workers=0)
    assert sample["seg.png"].shape[:2] == sample["png"].shape[:2] == (8, 8)
