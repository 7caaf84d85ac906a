"""Options that change pixels, keys or fields x fields that describe an image: updated exactly, or refused.

The reference is the picture itself: a bright rectangle is painted, and found again after the change.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json

import numpy as np
import pytest
from disks import ALL, HastyDisk
from images import encoded
from PIL import Image
from shards import samples_in

from wdskit import DecodeError, PackError, RowError, WdskitError, pack, reshard
from wdskit.codecs.edit.geometry import turn_move
from wdskit.codecs.edit.resize import Size, turn
from wdskit.codecs.fields import encode_field
from wdskit.codecs.images import decode_index
from wdskit.packing.described_fields import _decode_counts, _encode_counts
from wdskit.packing.options import PackOptions, ReshardOptions
from wdskit.packing.transforms import Transforms

WIDTH, HEIGHT = 96, 64
BOX = (16, 8, 48, 40)  # x0, y0, x1, y1: multiples of 8, so that JPEG blocks keep its edges
ID = 3


def painted(dtype=np.uint8, value=ID, *, box=BOX, size=(WIDTH, HEIGHT)):
    mask = np.zeros((size[1], size[0]), dtype)
    mask[box[1] : box[3], box[0] : box[2]] = value
    return mask


def photo(fmt="JPEG", orientation=1):
    pixels = np.repeat(painted(value=255)[..., None], 3, axis=2)
    exif = Image.Exif()
    exif[274] = orientation
    return encoded(pixels, fmt, **({"quality": 98} if fmt == "JPEG" else {}), exif=exif)


def palette_png():
    image = Image.fromarray(painted()).convert("P")
    image.putpalette([0, 0, 0, 200, 0, 0, 0, 200, 0, 9, 8, 7])
    return encoded(image, "PNG")


def run_lengths(mask):
    flat = np.concatenate([[0], mask.T.reshape(-1) > 0, [0]]).astype(np.int8)
    ends = np.flatnonzero(np.diff(flat)).tolist()
    lengths = np.diff([0, *ends, mask.size]).tolist()
    return lengths if lengths[-1] else lengths[:-1]


def coco(*, has_size=True, **more):
    x0, y0, x1, y1 = BOX
    lengths = run_lengths(painted())
    common = {
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "area": (x1 - x0) * (y1 - y0),
        "keypoints": [x0, y0, 2, x1, y1, 1, 0, 0, 0],
        "num_keypoints": 2,
        **more,
    }
    size = {"width": WIDTH, "height": HEIGHT} if has_size else {}
    return {
        "image": {"id": 1, "file_name": "a.jpg", **size},
        "annotations": [
            {"id": 1, "category_id": 1, "segmentation": [[x0, y0, x1, y0, x1, y1, x0, y1]], **common},
            {"id": 2, "category_id": 1, "segmentation": {"size": [HEIGHT, WIDTH], "counts": lengths}, **common},
            {
                "id": 3,
                "category_id": 1,
                "segmentation": {"size": [HEIGHT, WIDTH], "counts": _encode_counts(lengths)},
                **common,
            },
            {"id": 4, "category_id": 1, "caption": "a box"},
        ],
        "categories": {"1": "thing"},
    }


def derived(data, size=(WIDTH, HEIGHT)):
    return {
        "width": size[0],
        "height": size[1],
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "original_width": size[0],
    }


PHOTO = photo()
KINDS = {
    "coco": {"json": coco()},
    "derived": {"json": derived(PHOTO)},
    "mask, 8 bits": {"seg.png": encoded(painted(), "PNG")},
    "mask, palette": {"seg.png": palette_png()},
    "mask, 16 bits": {"seg.png": encoded(painted(np.uint16, 60_000), "PNG")},
    "mask, 1 bit": {"seg.png": encoded(Image.fromarray(painted() > 0), "PNG")},
    "mask, colours": {"seg.png": encoded(np.repeat(painted()[..., None], 3, axis=2), "PNG")},
    "boxes of another form": {"json": {"boxes": [{"x0": 1, "y0": 2, "x1": 3, "y1": 4}]}},
    "places in a sidecar": {"shapes.json": {"shapes": [{"points": [[1, 2], [3, 4]]}]}},
    "places by name": {"bbox.npy": np.zeros((2, 4))},
    "VOC": {"xml": b"<annotation><object><bndbox><xmin>1</xmin></bndbox></object></annotation>"},
    "YOLO": {"txt": b"0 0.5 0.5 0.25 0.25\n1 .1 .1 .1 .1\n"},
    "class": {"cls": 1},
    "caption": {"txt": "a 3 5", "json": {"score": 0.25, "embedding": [0.5] * 8, "caption": "a box"}},
    "second image": {"right.jpg": photo()},
}
NEUTRAL = {"class", "caption"}
"""Kinds of fields that describe nothing in the image, and stay unchanged."""

CHANGES = {
    "resize": [{"resize": 32}, {"resize": 23}],
    "resize_mode": [{"resize": 48, "resize_mode": mode} for mode in ("longer", "crop", "pad")],
    "upscale": [{"resize": 128, "upscale": True}],
    "format": [{"format": "webp"}, {"format": "png"}],
    "quality": [{"format": "webp", "quality": 99}],
    "orient": [{"orient": True}],
    "background": [{"resize": 48, "resize_mode": "pad", "background": "black"}],
    "image_fields": [{"resize": 32, "image_fields": "jpg"}],
    "mask_fields": [{"resize": 32, "mask_fields": "seg.png"}, {"orient": True, "mask_fields": "seg.png"}],
    "mask_fill": [{"resize": 48, "resize_mode": "pad", "mask_fields": "seg.png", "mask_fill": 0}],
    "derive": [{"derive": "width,height", "image_fields": "jpg"}, {"derive": "width,height", "resize": 32}],
    "keys": [{"keys": "hashed"}, {"keys": "clean"}],
    "fields": [{"fields": ["note.txt=caption"]}, {"resize": 32, "fields": ["txt=width"]}],
    "classes": [{"classes": ("a", "b")}],
    "keep": [{"keep": "jpg"}],
    "drop": [{"drop": "jpg"}],
    "rename": [{"rename": "jpg=left.jpg"}],
    "filter": [{"filter": "'jpg' in fields", "resize": 32}],
}
ELSEWHERE = {"omit", "sidecars", "files", "images", "image_column", "key_column", "from_", "allow_no_image", "require"}
"""Options that choose the files and columns of a sample. The results are the same as for rows."""

UNCHANGED = {
    "max_samples", "max_bytes", "num_shards", "shuffle", "split", "pattern", "workers", "threads", "on",
    "part", "append", "overwrite", "restart", "staging", "dry_run", "export", "split_name", "validate",
    "max_pixels", "skip_bad", "missing", "duplicates", "sample", "seed", "duplicate_keys", "check",
    "progress", "disk", "columns",
}  # fmt: skip
"""Options that change no pixel, key or field of a sample."""


@pytest.mark.parametrize("options", [PackOptions, ReshardOptions])
def test_every_option_has_its_column(options):
    """A new option is added to CHANGES, unless it changes no pixel, key or field."""
    assert {one.name for one in dataclasses.fields(options)} <= {*CHANGES} | ELSEWHERE | UNCHANGED


OTHER_FORMS = {"boxes of another form", "places in a sidecar", "places by name", "VOC", "YOLO"}


def is_refused(kind, options):
    """Return whether the combination is refused. Only this function decides it."""
    moves = "resize" in options or options.get("orient")
    has_mask, names_mask = kind.startswith("mask"), "mask_fields" in options
    if "mask_fill" in options and kind == "mask, colours":
        return True
    if options.get("fields") == ["txt=width"]:
        return True
    if names_mask and not has_mask:
        return True  # no sample has the field
    if has_mask and not names_mask and (moves or "format" in options):
        return True
    if kind == "coco" and options.get("resize_mode") == "crop":
        return True
    if kind == "second image":
        changes = moves or "format" in options or "derive" in options
        return changes and "image_fields" not in options
    return bool(kind in OTHER_FORMS and moves)


def sample_of(kind, orientation=1):
    fields = {"__key__": "a+b", "jpg": photo(orientation=orientation), **KINDS[kind]}
    if kind == "derived":
        fields["json"] = derived(fields["jpg"])
    return fields


def found_box(image):
    """Return the rectangle in a picture: its bright area."""
    rows, columns = np.nonzero(np.array(image.convert("L")) > 127)
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


def check(kind, sample, before):
    """Compare the description in a sample with its image."""
    name = next((field for field in ("jpg", "left.jpg", "webp", "png") if field in sample), None)
    if name is None:
        return
    image = Image.open(io.BytesIO(sample[name]))
    box = np.array(found_box(image))
    size = image.size
    if kind in NEUTRAL:
        for field in KINDS[kind].keys() & sample.keys():
            value = before[field]
            if field == "json":
                assert json.loads(sample[field]).items() >= value.items()
            else:
                assert sample[field].decode() == str(value)
    if kind == "coco" and "json" in sample:
        value = json.loads(sample["json"])
        assert (value["image"]["width"], value["image"]["height"]) == size
        for one in value["annotations"][:3]:
            x, y, width, height = one["bbox"]
            assert np.abs(box - [x, y, x + width, y + height]).max() <= 1
            corners = np.array(one["keypoints"]).reshape(3, 3)
            assert np.allclose(sorted(corners[:2, 0]), [x, x + width])
            assert np.allclose(sorted(corners[:2, 1]), [y, y + height])
            assert corners[:, 2].tolist() == [2, 1, 0]
            assert corners[2].tolist() == [0, 0, 0]
            shape = one["segmentation"]
            if isinstance(shape, list):
                points = np.array(shape[0]).reshape(-1, 2)
                assert np.allclose([*points.min(0), *points.max(0)], [x, y, x + width, y + height])
                assert one["area"] == pytest.approx(width * height)
            else:
                counts = shape["counts"]
                counts = _decode_counts(counts, "") if isinstance(counts, str) else counts
                mask = np.repeat(np.arange(len(counts)) % 2, counts).reshape(size).T
                assert shape["size"] == [size[1], size[0]]
                assert one["area"] == mask.sum()
                assert np.abs(box - found_box(Image.fromarray((mask * 255).astype(np.uint8)))).max() <= 1
        assert value["annotations"][3] == before["json"]["annotations"][3]
    if kind == "derived" and "json" in sample:
        value = json.loads(sample["json"])
        now = {**derived(sample[name], size), "original_width": WIDTH}
        assert {field: value[field] for field in now} == now
    if kind.startswith("mask") and "seg.png" in sample:
        mask, old = (Image.open(io.BytesIO(data)) for data in (sample["seg.png"], before["seg.png"]))
        assert (mask.mode, mask.getpalette(), mask.info.get("transparency")) == (
            old.mode, old.getpalette(), old.info.get("transparency"),
        )  # fmt: skip
        assert sample["seg.png"][24:26] == before["seg.png"][24:26]  # bit depth and colour type
        numbers = np.array(mask) if kind == "mask, colours" else decode_index(sample["seg.png"], max_pixels=10**6)
        was = np.array(old) if kind == "mask, colours" else decode_index(before["seg.png"], max_pixels=10**6)
        assert {*np.unique(numbers)} == {*np.unique(was)}
        assert mask.size == size
        plane = (numbers if numbers.ndim == 2 else numbers[..., 0]) > 0
        assert np.abs(box - found_box(Image.fromarray((plane * 255).astype(np.uint8)))).max() <= 1
    if "derive" in kind and "json" in sample:
        assert json.loads(sample["json"])["width"] == size[0]


def attempt(run, kind, options):
    """Return the samples that a command wrote; None only after the expected error."""
    if not is_refused(kind, options):
        return run()
    with pytest.raises(WdskitError):
        run()
        pytest.fail(f"{kind} and {options} were not refused")
    return None


def cases(of):
    names = {one.name for one in dataclasses.fields(of)}
    return [
        pytest.param(options, id="-".join(f"{key}={value}" for key, value in options.items()))
        for option, many in CHANGES.items()
        if option in names
        for options in many
        if options.keys() <= names
    ]


def sample_for(kind, options):
    """Return a sample; with `orient` the photo has an EXIF orientation."""
    return sample_of(kind, orientation=6 if options.get("orient") else 1)


@pytest.mark.parametrize("options", cases(Transforms))
def test_a_field_that_describes_the_image_is_updated_or_the_sample_is_refused(options):
    for kind in KINDS:
        sample = sample_for(kind, options)
        fields = [(name, encode_field(name, value)) for name, value in sample.items() if name != "__key__"]

        def run(fields=fields):
            transforms = PackOptions(**options).transforms
            transforms.check_used(name for name, _ in fields)
            return dict(transforms.apply(sorted(fields)))

        made = attempt(run, kind, options)
        if made is not None:
            check(kind, made, sample)


def through(command, sample, folder, options):
    if command is pack and "fields" not in options:
        pack([sample], folder / "out", disk=HastyDisk(), **options)
    else:
        pack([sample], folder / "in", disk=HastyDisk())
        source = str(folder / "in" / "*.tar") if command is pack else str(folder / "in")
        command(source, folder / "out", disk=HastyDisk(), **options)
    [made] = samples_in(folder / "out").values()
    return made


@pytest.mark.parametrize(("command", "of"), [(pack, PackOptions), (reshard, ReshardOptions)], ids=["pack", "reshard"])
def test_commands_update_or_refuse_as_their_transforms_do(command, of, tmp_path):
    """All pairs run with WDSKIT_ALL_FAULTS; otherwise options without transforms, and each kind with one transform."""
    number = 0
    for param in cases(of):
        [options] = param.values
        is_transform = options.keys() <= {one.name for one in dataclasses.fields(Transforms)}
        for kind in KINDS:
            skips = ("fields" in options and kind != "caption") or ("classes" in options)
            if skips or not (ALL or options == {"resize": 32} or (not is_transform and kind in {"coco", "caption"})):
                continue
            number += 1
            folder = tmp_path / str(number)
            sample = sample_for(kind, options)
            made = attempt(lambda: through(command, sample, folder, options), kind, options)  # noqa: B023
            if made is None:
                assert not [*(folder / "out").glob("*.tar")]
            else:
                check(kind, made, sample)
    assert number > 15


# Forms of descriptions.


def moved(orientation=1, *, fields=(), **options):
    """Return the fields of a sample with a photo of 96 x 64 pixels, after a change."""
    return dict(Transforms(**options).apply([("jpg", photo(orientation=orientation)), *fields]))


def json_of(value, **options):
    return json.loads(moved(fields=[("json", json.dumps(value).encode())], **options)["json"])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("options", [{"orient": True}, {"orient": True, "resize": 32}, {"resize": 32}])
def test_turned_images_take_their_annotations_along_or_are_refused(orientation, options):
    """Annotations belong to the stored pixels if the image size in them says so; after a half turn it cannot."""
    fields = [("json", json.dumps(coco()).encode())]
    is_unclear = orientation in {2, 3, 4} and "orient" in options
    if is_unclear:
        with pytest.raises(DecodeError, match="json: the image has an EXIF orientation, and nothing shows whether"):
            moved(orientation, fields=fields, **options)
    else:
        check("coco", moved(orientation, fields=fields, **options), {"json": coco()})


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_annotations_of_the_upright_image_stay_when_the_image_becomes_upright(orientation):
    upright = turn(painted(), orientation)
    x0, y0, x1, y1 = found_box(Image.fromarray(upright * 80))
    value = {
        "image": {"width": HEIGHT, "height": WIDTH},
        "annotations": [{"bbox": [int(x0), int(y0), int(x1 - x0), int(y1 - y0)]}],
        "categories": {},
    }
    mask = encoded(upright, "PNG")
    made = moved(
        orientation,
        fields=[("json", json.dumps(value).encode()), ("seg.png", mask)],
        orient=True,
        mask_fields="seg.png",
    )
    assert json.loads(made["json"]) == value
    assert made["seg.png"] == mask
    box = found_box(Image.open(io.BytesIO(made["jpg"])))
    assert np.abs(np.array(box) - [x0, y0, x1, y1]).max() <= 1


def test_points_move_as_pixels_do():
    """Each pixel of a small picture is moved by every orientation."""
    numbers = np.arange(12).reshape(3, 4)
    for orientation in range(1, 9):
        move = turn_move(Size(4, 3), orientation)
        new = turn(numbers, orientation)
        assert np.array_equal(move.nearest(numbers, -1), new)
        assert np.array_equal(move.then(move.back()).nearest(numbers, -1), numbers)
        for y, x in np.ndindex(3, 4):
            to_x, to_y = move(x + 0.5, y + 0.5)
            assert new[int(to_y), int(to_x)] == numbers[y, x]


def test_nearest_is_that_of_pillow():
    pixels = np.random.default_rng(1).integers(0, 255, (37, 53), dtype=np.uint8)
    for size in (5, 20, 36, 90):
        made = moved_mask(encoded(pixels, "PNG"), (53, 37), resize=size, upscale=True)
        wanted = Image.fromarray(pixels).resize(made.size, Image.Resampling.NEAREST)
        assert np.array_equal(np.array(made), np.array(wanted))


def moved_mask(mask, size, **options):
    picture = encoded(np.zeros((size[1], size[0], 3), np.uint8), "JPEG")
    made = dict(Transforms(mask_fields="seg.png", **options).apply([("jpg", picture), ("seg.png", mask)]))
    assert Image.open(io.BytesIO(made["jpg"])).size == Image.open(io.BytesIO(made["seg.png"])).size
    return Image.open(io.BytesIO(made["seg.png"]))


def grey_png(bits, rows):
    """Return a PNG with 1, 2 or 4 bits of grey, which Pillow cannot write."""
    from wdskit.codecs.edit.masks import _encode

    return _encode(np.array(rows, np.uint8), bits, 0, [])


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_masks_of_few_bits_keep_their_bits_and_numbers(bits):
    numbers = np.arange(40).reshape(5, 8) % (1 << bits)
    data = grey_png(bits, numbers)
    assert np.array_equal(decode_index(data, max_pixels=100), numbers)
    picture = encoded(np.zeros((5, 8, 3), np.uint8), "JPEG")
    made = dict(Transforms(resize=10, upscale=True, mask_fields="seg.png").apply([("jpg", picture), ("seg.png", data)]))
    assert np.array_equal(decode_index(made["seg.png"], max_pixels=1000), numbers.repeat(2, 0).repeat(2, 1))
    assert made["seg.png"][24] == bits


@pytest.mark.parametrize(
    ("mask", "options", "problem"),
    [
        (encoded(painted(), "PNG"), {"resize_mode": "pad"}, "padding adds pixels .* --mask-fill, for example 255"),
        (encoded(painted() > 0, "PNG"), {"resize_mode": "pad", "mask_fill": 2}, "cannot store the number 2"),
        (
            encoded(np.zeros((64, 96, 3), np.uint8), "PNG"),
            {"resize_mode": "pad", "mask_fill": 2},
            "the mask has colours",
        ),
        (encoded(painted(size=(95, 64)), "PNG"), {}, "for an image of 95 x 64 pixels, but the image has 96 x 64"),
        (encoded(painted(), "GIF"), {}, "a mask must be a PNG file"),
    ],
    ids=["pad", "fill", "colours", "size", "format"],
)
def test_a_mask_that_cannot_follow_is_refused(mask, options, problem):
    with pytest.raises(DecodeError, match=f"^seg.png: mask: .*{problem}"):
        moved(fields=[("seg.png", mask)], resize=48, mask_fields="seg.png", validate="none", **options)


def test_a_padded_mask_has_the_number_that_was_asked_for():
    fields = [("seg.png", encoded(painted(), "PNG"))]
    made = moved(fields=fields, resize=96, resize_mode="pad", mask_fields="seg.png", mask_fill=255)
    numbers = decode_index(made["seg.png"], max_pixels=10**5)
    assert numbers.shape == (96, 96)
    assert (numbers[:16] == 255).all()
    assert (numbers[80:] == 255).all()
    assert np.array_equal(numbers[16:80], painted())


def test_a_mask_that_nobody_named_is_refused_with_the_option():
    mask = [("seg.png", encoded(painted(), "PNG"))]
    with pytest.raises(DecodeError, match=r"seg.png: it has the size of the image, .* --mask-fields seg.png"):
        moved(fields=mask, resize=32, image_fields="jpg")
    for options in ({"resize": 32}, {"format": "webp"}):
        with pytest.raises(DecodeError, match=r"seg.png: it stores one number per pixel, .* --mask-fields seg.png"):
            moved(fields=mask, image_fields="jpg,seg.png", **options)


def test_two_grey_images_are_no_masks_of_each_other():
    fields = [(name, encoded(painted(value=200), "PNG")) for name in ("left.png", "right.png")]
    made = dict(Transforms(resize=32, image_fields="left.png,right.png").apply(fields))
    assert {Image.open(io.BytesIO(data)).size for data in made.values()} == {(48, 32)}


@pytest.mark.parametrize(
    "value",
    [
        {"bbox": [1, 2, 3, 4]},
        {"bbox": "1 2 3 4"},
        {"xmin": "1", "ymin": "2"},
        {"face": {"left": 10, "top": 5, "right": 60, "bottom": 40}},
        {"vertices": [[1, 2], [3, 4]]},
        {"bounding_poly": [1, 2, 3, 4]},
        {"objects": [{"face_box": {"left": 1}}]},
        {"faceKeypoints": [[1, 2]]},
        [{"polygon": [[1, 2], [3, 4]]}],
        {**coco(), "boxes": [[1, 2, 3, 4]]},
        coco(rotated_box=[1, 2, 3, 4, 5]),
        coco(segments_info=[{"bbox": [1, 2, 3, 4]}]),
        coco(bbox=[1, 2, 3]),
        coco(keypoints=[1, 2]),
        coco(area="5"),
        {**coco(), "image": {"width": 95, "height": 64}},
        {**coco(), "image": {"width": 96}},
        {**coco(), "annotations": [{"segmentation": {"size": [64, 96], "counts": [5]}}]},
        {**coco(), "annotations": [{"segmentation": {"size": [63, 96], "counts": [63 * 96]}}]},
        {**coco(), "annotations": [{"segmentation": {"size": [64, 96], "counts": "x y"}}]},
    ],
)
def test_places_that_are_not_understood_are_refused_when_they_would_move(value):
    text = json.dumps(value).encode()
    with pytest.raises(DecodeError, match=r"^json: "):
        moved(fields=[("json", text)], resize=32)
    assert moved(fields=[("json", text)], resize=200)["json"] == text  # nothing moves


@pytest.mark.parametrize(
    "value", [{"points": 5, "x": 1}, {"box": "blue"}, {"mask": None}, {"caption": "box 1, 2"}, [1]]
)
def test_words_alone_are_no_places(value):
    assert json_of(value, resize=32) == value


def test_json_keeps_the_values_that_do_not_describe_the_image():
    value = {"width": 1000, "height": 64, "bytes": 5, "sha256": "ab", "big": 10**30, "f": 0.1}
    assert json_of(value, resize=32) == value
    assert json_of({"width": "96", "height": "64"}, resize=32) == {"width": "48", "height": "32"}
    assert json_of({"height": 64.0}, resize=32) == {"height": 32.0}


def test_run_lengths_are_those_of_pycocotools():
    """In pycocotools, 10 x 10 set pixels are `0T3`."""
    assert _decode_counts("0T3", "") == [0, 100]
    assert _encode_counts([0, 100]) == "0T3"
    random = np.random.default_rng(0)
    for count in range(1, 40):
        lengths = random.integers(0, 10**4, count).tolist()
        assert _decode_counts(_encode_counts(lengths), "") == lengths


@pytest.mark.parametrize(("depth", "validate"), [(1020, None), (5000, "none")])
def test_json_that_is_nested_too_deeply_is_an_error_of_its_row(tmp_path, depth, validate):
    row = {"__key__": "a", "jpg": photo(), "json": b"[" * depth + b"]" * depth}
    with pytest.raises(RowError, match="json: it is nested too deeply"):
        pack([row], tmp_path / "out", resize=32, validate=validate)


def test_a_field_of_a_value_that_the_image_loses_is_refused():
    for columns in ("txt=width", "npy=image.bbox"):
        with pytest.raises(PackError, match=f"^fields: {columns} describes the image"):
            ReshardOptions(fields=[columns], resize=32)
    ReshardOptions(fields=["txt=width"])


def test_a_column_with_the_path_of_a_mask_is_a_file_and_no_place_in_the_image(tmp_path):
    Image.new("RGB", (64, 48)).save(tmp_path / "a1.jpg")
    Image.fromarray(np.arange(64 * 48, dtype=np.uint8).reshape(48, 64) % 7).save(tmp_path / "a1_seg.png")
    (tmp_path / "pairs.csv").write_text("image,mask,label\na1.jpg,a1_seg.png,2\n")
    pack(tmp_path / "pairs.csv", tmp_path / "d", fields=["seg.png=mask"], resize=24, mask_fields="seg.png")
    (sample,) = samples_in(tmp_path / "d").values()
    assert Image.open(io.BytesIO(sample["jpg"])).size == Image.open(io.BytesIO(sample["seg.png"])).size == (32, 24)
    assert json.loads(sample["json"]) == {"image": "a1.jpg", "mask": "a1_seg.png", "label": "2"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"image_fields": "nope", "resize": 32}, "image_fields: no sample has the field nope. The fields are jpg"),
        ({"mask_fields": "nope.png", "resize": 32}, "mask_fields: no sample has the field nope.png"),
    ],
)
@pytest.mark.parametrize("command", ["pack", "stream", "reshard"])
def test_a_name_that_no_sample_has_is_an_error(command, options, problem, tmp_path):
    rows = [{"__key__": "a", "jpg": PHOTO}]
    source = rows if command == "pack" else iter(rows)
    if command == "reshard":
        pack(rows, tmp_path / "in", disk=HastyDisk())
        with pytest.raises(PackError, match=f"^{problem}"):
            reshard(str(tmp_path / "in"), tmp_path / "out", **options)
    else:
        with pytest.raises((PackError, RowError), match=problem if command == "pack" else "nope"):
            pack(source, tmp_path / "out", **options)
    assert not [*(tmp_path / "out").glob("*.tar")]


@pytest.mark.parametrize(
    "options",
    [{"resize": 32}, {"format": "webp"}, {"orient": True}, {"derive": "bytes"}, {"duplicates": "drop"}],
    ids=str,
)
def test_options_for_images_are_refused_where_no_sample_has_one(options, tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a.wav", "b.wav"):
        (tmp_path / "in" / name).write_bytes(b"RIFF")
    with pytest.raises(PackError, match=f"^{next(iter(options))}: no sample has an image"):
        pack(str(tmp_path / "in"), tmp_path / "out", files="wav", **options)
    with pytest.raises(PackError, match="image_fields: "):
        pack(str(tmp_path / "in"), tmp_path / "out", files="wav", image_fields="jpg", resize=5)
