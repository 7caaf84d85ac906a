"""Decode and crop in one step: which stages run so, and that they give what they give one after the other."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from fusing import CROPS, ENDINGS, PICTURE, SPECS, assert_same, at, each_of, results
from hypothesis import given, settings
from hypothesis import strategies as st
from images import EXTRANEOUS, FILES, encoded, palette_image, pixels
from PIL import Image

from wdskit import Pipeline
from wdskit.codecs.images import IMAGE_SPECS
from wdskit.engine.sample import Each
from wdskit.errors import DecodeError, ImageTooLarge, PipelineError, SampleError
from wdskit.pipeline.compose import compose
from wdskit.stages.base import Place
from wdskit.stages.batching import Batched
from wdskit.stages.fields import Decode, Map, Rename, ToTuple
from wdskit.stages.images.fused import Fused, fuse
from wdskit.stages.images.transforms import (
    CenterCrop,
    Normalize,
    RandomFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
)
from wdskit.stages.specs import STAGES, ShuffleSpec, StreamSpec


@pytest.mark.parametrize("images", SPECS)
@pytest.mark.parametrize("ending", sorted(ENDINGS))
@pytest.mark.parametrize("crop", sorted(CROPS))
def test_one_step_gives_what_the_stages_give(crop, ending, images):
    """To the bit where pixels are uint8 until the end; float images are resized as uint8 here, so within one level."""
    specs = [*CROPS[crop], *ENDINGS[ending]]
    one, apart = each_of(*specs, images=images), each_of(*specs, images=images, fuse=False)
    level = 1 / 255 / (0.225 if any(spec.name == "normalize" for spec in specs) else 1)
    atol = 0 if images.endswith("8") and "tensor normalize" not in ending else 1e-5 if images.endswith("8") else level
    for name in ("jpeg", "jpeg 4:4:4", "png", "webp"):
        sample = {"__key__": "a", "cls": b"7", "jpg": FILES[name], "json": b"{}", "bin": b"x"}
        for a, b in zip(results(one, sample, 6), results(apart, sample, 6), strict=True):
            assert_same(a, b, atol + 1e-6 * (atol > 0))


# --- every kind of file, as the present decode stage has it


def whole_files():
    exif = Image.Exif()
    exif[0x0112] = 6
    side = encoded(np.arange(20 * 31 * 3, dtype=np.uint8).reshape(20, 31, 3), "JPEG", exif=exif)
    deep = (np.arange(20 * 30, dtype=np.uint16) * 109).reshape(20, 30)
    return {
        **FILES,
        **{f"jpeg extraneous {name}": data for name, data in EXTRANEOUS.items()},
        "jpeg orientation": side,
        "png orientation": encoded(pixels(20, 31, 3), "PNG", exif=exif),
        "png 16 bit": encoded(Image.fromarray(deep), "PNG"),
        "tiff 16 bit": encoded(Image.fromarray(deep), "TIFF"),
        "ppm 16 bit": b"P6\n20 10\n65535\n" + deep.astype(">u2").tobytes(),
        "png palette, transparency": encoded(palette_image(), "PNG", transparency=bytes([0, 128, 200, 255])),
        "jpeg cmyk large": encoded(Image.fromarray(pixels(60, 70, 3)).convert("CMYK"), "JPEG"),
    }


WHOLE = whole_files()


@pytest.mark.parametrize("name", sorted(WHOLE))
@pytest.mark.parametrize("crop", ["random", "middle"])
def test_every_kind_of_file_gives_the_same_pixels(name, crop):
    """Orientation is not applied, grey is three times grey, alpha is dropped, CMYK is Pillow's, 16 bits keep the upper
    8; none of these is large enough to be decoded at a smaller scale.
    """
    specs = CROPS[crop] if crop == "random" else [Resize(size=30), CenterCrop(size=20)]
    one, apart = each_of(*specs), each_of(*specs, fuse=False)
    for a, b in zip(results(one, {"jpg": WHOLE[name]}, 3), results(apart, {"jpg": WHOLE[name]}, 3), strict=True):
        assert_same(a, b)


SMALL = [RandomResizedCrop(size=2, scale=[0.5, 1.0])]  # of 21x34: a half, a quarter, an eighth


@pytest.mark.parametrize("name", sorted(name for name in WHOLE if name not in FILES or name.startswith("jpeg")))
def test_small_crops_of_odd_files_are_close_or_the_same(name):
    """What cannot be decoded at a smaller scale is the same to the bit."""
    one, apart = each_of(*SMALL), each_of(*SMALL, fuse=False)
    scaled = name.startswith("jpeg") and "cmyk" not in name and "extraneous" not in name
    for a, b in zip(results(one, {"jpg": WHOLE[name]}, 5), results(apart, {"jpg": WHOLE[name]}, 5), strict=True):
        assert_same(a, b, atol=60 if scaled else 0)


def failure(each, sample):
    with pytest.raises((SampleError, PipelineError)) as caught:
        each.apply(sample, at())
    err = caught.value
    return type(err), str(err), getattr(err, "stage", None), type(err.__cause__), getattr(err.__cause__, "field", None)


@pytest.mark.parametrize("name", ["jpeg", "jpeg progressive", "jpeg grey", "jpeg cmyk", "png", "webp"])
def test_every_truncated_file_gives_the_same_error(name):
    """Cut at every byte, whatever the scale: the lost part is found even where no pixel of it is wanted."""
    one, apart = each_of(*SMALL), each_of(*SMALL, fuse=False)
    for cut in range(0, len(FILES[name]), 1 if name.startswith("jpeg") else 7):
        sample = {"cls": b"1", "jpg": FILES[name][:cut]}
        assert failure(one, sample) == failure(apart, sample)


def test_a_scan_that_ends_early_is_the_same_error_at_every_scale():
    data = FILES["jpeg 4:4:4"]
    cut = data[: len(data) - 200] + b"\xff\xd9"
    for size in (30, 12, 5, 2, 1):
        found = [failure(each_of(Resize(size=size), fuse=is_fused), {"jpg": cut}) for is_fused in (True, False)]
        assert found[0] == found[1]
        assert "not one complete JPEG image" in found[0][1]


@settings(max_examples=150)
@given(data=st.data())
def test_damage_is_the_same_error_or_about_the_same_picture(data):
    name = data.draw(st.sampled_from(["jpeg", "jpeg progressive", "jpeg 4:2:2", "png", "webp", "gif"]))
    damaged = bytearray(FILES[name])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    sample = {"jpg": bytes(damaged)}
    outcomes = []
    for is_fused in (True, False):
        try:
            outcomes.append(each_of(*SMALL, fuse=is_fused, max_pixels=5000).apply(sample, at())["jpg"].shape)
        except SampleError as err:
            outcomes.append(str(err))
    assert outcomes[0] == outcomes[1]


def test_the_limit_is_the_same():
    for name in ("jpeg", "jpeg cmyk", "png"):
        for is_fused in (True, False):
            with pytest.raises(SampleError, match="decode failed: the image's header promises") as caught:
                each_of(*SMALL, fuse=is_fused, max_pixels=30).apply({"jpg": FILES[name]}, at())
            assert isinstance(caught.value.__cause__, ImageTooLarge)


def test_errors_of_other_fields_come_in_the_order_of_the_sample():
    for is_fused in (True, False):
        each = each_of(*SMALL, fuse=is_fused)
        for sample, message in (
            ({"cls": b"x", "jpg": b"no image"}, "a.tar: k0: decode failed: cls: not an integer"),
            ({"jpg": b"no image", "cls": b"x"}, "a.tar: k0: decode failed: not an image of a known format"),
        ):
            with pytest.raises(SampleError) as caught:
                each.apply(sample, at())
            assert str(caught.value).startswith(message)
            assert caught.value.stage == "decode"
            assert isinstance(caught.value.__cause__, DecodeError)
            assert caught.value.__cause__.field == next(iter(sample))


def test_what_fails_behind_decoding_is_told_as_the_crops(monkeypatch):
    def fail(*args, **options):
        raise MemoryError("no room")

    for is_fused in (True, False):
        each = each_of(*CROPS["random"], fuse=is_fused)
        monkeypatch.setattr(
            "wdskit.stages.images.jpeg_crop._resize" if is_fused else "torch.nn.functional.interpolate", fail
        )
        with pytest.raises(SampleError, match=r"a.tar: k0: random_resized_crop failed: MemoryError: no room") as caught:
            each.apply({"jpg": FILES["jpeg"]}, at())
        monkeypatch.undo()
        assert caught.value.stage == "random_resized_crop"
        assert isinstance(caught.value.__cause__, MemoryError)


@pytest.mark.parametrize("value", [(1, 2), b"jpg", None])
def test_what_is_no_sample_is_the_same_error(value):
    found = [failure(each_of(*SMALL, fuse=is_fused), value) for is_fused in (True, False)]
    assert found[0] == found[1]
    assert "decode: it takes samples" in found[0][1]


# --- which field


@pytest.mark.parametrize(
    "sample",
    [
        {"png": PICTURE},
        {"left.JPG": PICTURE, "txt": b"a"},
        {"jpg": PICTURE, "png": PICTURE},
        {"jpg": PICTURE, "png": np.zeros((4, 4, 3), np.uint8)},
        {"jpg": np.zeros((40, 50, 3), np.uint8), "cls": b"3"},
        {"jpg": Image.new("RGB", (40, 50))},
        {"jpg": bytearray(PICTURE)},
        {"cls": b"3"},
        {},
        {"__jpg__": PICTURE},
        {"__x.jpg": PICTURE, "jpg": PICTURE},
        {"jpg": "text"},
        {"jpg": PICTURE, "image": PICTURE},
        {"image": PICTURE},
    ],
    ids=lambda sample: " ".join(f"{field}:{type(value).__name__}" for field, value in sample.items()) or "empty",
)
@pytest.mark.parametrize("fields", [None, "jpg;png", "image"])
@pytest.mark.parametrize("only", [None, "png"])
def test_samples_of_every_make_up_give_the_same_or_fail_alike(sample, fields, only):
    outcomes = []
    for is_fused in (True, False):
        each = each_of(RandomResizedCrop(size=8, fields=fields), fuse=is_fused, only=only)
        try:
            outcomes.append(each.apply(dict(sample), at()))
        except (SampleError, PipelineError) as err:
            outcomes.append(err)
    if isinstance(outcomes[0], Exception):
        assert type(outcomes[0]) is type(outcomes[1])
        assert str(outcomes[0]) == str(outcomes[1])
        assert getattr(outcomes[0], "stage", "") == getattr(outcomes[1], "stage", "")
        return
    for outcome in outcomes:
        for field, value in outcome.items():
            outcome[field] = np.array(value) if isinstance(value, Image.Image) else value
    assert_same(*outcomes)


def test_a_field_renamed_before_decode_counts_as_an_image():
    """Beside it stands another one, and which is meant nobody has said: the same as without fusing."""
    specs = [Rename(names={"photo": "jpg"}), Decode(images="rgb8"), RandomResizedCrop(size=8)]
    stages = compose([StreamSpec(shards=__file__), *specs], place=Place(0, 1)).pipeline
    [each] = [stage for stage in stages if isinstance(stage, Each)]
    result = each.apply({"jpg": PICTURE, "png": PICTURE}, at())
    assert result["photo"] == PICTURE
    assert result["png"].shape == (8, 8, 3)


def test_the_sample_is_copied_and_other_fields_keep_their_order():
    sample = {"__key__": "a", "txt": b"t", "jpg": PICTURE, "cls": b"1"}
    kept = dict(sample)
    result = each_of(*SMALL).apply(sample, at())
    assert sample == kept
    assert list(result) == list(sample)


# --- which runs of stages become one, and which do not


STREAM = StreamSpec(shards="a.tar")
DECODE = Decode(images="rgb8")
RRC = RandomResizedCrop(size=224)
RESIZE = Resize(size=256)
CENTER = CenterCrop(size=224)
FLIP = RandomFlip()
NORMALIZE = Normalize(preset="imagenet")
TENSOR = ToTensor()
MAP = Map(fn="my_augment")
TUPLE = ToTuple(fields=["jpg;png", "cls"])


def lengths(*specs):
    """How many stages each item of the plan holds; the stages must come out in order and complete."""
    planned = fuse(specs)
    flat = [stage for item in planned for stage in (item.stages if isinstance(item, Fused) else [item])]
    assert flat == list(specs)
    return [len(item.stages) if isinstance(item, Fused) else 1 for item in planned]


@pytest.mark.parametrize(
    "run",
    [
        [RRC],
        [RESIZE],
        [RESIZE, CENTER],
        [RRC, FLIP],
        [RRC, NORMALIZE],
        [RRC, TENSOR],
        [RESIZE, CENTER, FLIP, NORMALIZE],
        [RRC, FLIP, NORMALIZE, TENSOR],
        [RRC, FLIP, TENSOR, NORMALIZE],
        [RRC, TENSOR, NORMALIZE],
    ],
)
def test_a_run_is_one_wherever_it_stands(run):
    assert lengths(DECODE, *run) == [1 + len(run)]
    assert lengths(STREAM, ShuffleSpec(size=9), DECODE, *run, TUPLE, Batched(size=4)) == [1, 1, 1 + len(run), 1, 1]
    assert lengths(STREAM, DECODE, *run, MAP, TUPLE) == [1, 1 + len(run), 1, 1]


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([DECODE, RRC, MAP, FLIP, NORMALIZE], [2, 1, 1, 1]),
        ([DECODE, RRC, FLIP, FLIP], [3, 1]),
        ([DECODE, RRC, NORMALIZE, FLIP], [3, 1]),
        ([DECODE, RRC, NORMALIZE, NORMALIZE], [3, 1]),
        ([DECODE, RRC, NORMALIZE, TENSOR, NORMALIZE], [4, 1]),
        ([DECODE, RRC, CENTER], [2, 1]),
        ([DECODE, RRC, RRC], [2, 1]),
        ([DECODE, RESIZE, CENTER, CENTER], [3, 1]),
        ([DECODE, RESIZE, FLIP, CENTER], [3, 1]),
        ([DECODE, RRC, DECODE, RRC], [2, 2]),
    ],
)
def test_a_run_ends_where_something_else_comes(specs, expected):
    assert lengths(*specs) == expected


@pytest.mark.parametrize(
    "specs",
    [
        [DECODE],
        [DECODE, MAP, RRC],
        [DECODE, Rename(names={"image": "jpg"}), RRC],
        [DECODE, ShuffleSpec(size=9), RRC],
        [DECODE, functools.partial(list), RRC],
        [DECODE, CENTER],
        [DECODE, FLIP, RRC],
        [DECODE, NORMALIZE],
        [MAP, RRC, FLIP],
        [RRC, DECODE],
        [Decode(), RRC],
        [Decode(images="rgb8", fuse=False), RRC, NORMALIZE],
        [DECODE, RandomResizedCrop(size=224, masks="seg.png"), FLIP],
        [DECODE, Resize(size=224, fields="jpg", masks="png"), CENTER],
        [DECODE, RandomResizedCrop(size=224, fields="left.jpg right.jpg"), FLIP],
    ],
)
def test_what_stands_between_and_what_acts_on_several_fields_stays_apart(specs):
    assert lengths(*specs) == [1] * len(specs)


@pytest.mark.parametrize("images", sorted(IMAGE_SPECS))
def test_only_colour_arrays_and_tensors_are_fused(images):
    fused = images in {"rgb8", "rgb", "torchrgb8", "torchrgb", "torch"}
    assert lengths(Decode(images=images), RRC) == ([2] if fused else [1, 1])


def test_the_stages_of_a_run_name_the_same_field():
    def named(spec, fields):
        return type(spec)(**{**spec.model_dump(), "fields": fields})

    assert lengths(DECODE, *(named(spec, "jpg;png") for spec in (RESIZE, CENTER, FLIP, NORMALIZE))) == [5]
    assert lengths(DECODE, named(RRC, "jpg"), FLIP, NORMALIZE) == [2, 1, 1]
    assert lengths(DECODE, named(RRC, "jpg"), named(FLIP, "png")) == [2, 1]
    assert lengths(DECODE, RRC, named(FLIP, "jpg")) == [2, 1]
    assert lengths(DECODE, named(RESIZE, "jpg"), CENTER) == [2, 1]
    assert lengths(DECODE, RRC, RandomFlip(masks="seg.png"), NORMALIZE) == [2, 1, 1]


def test_the_plan_is_no_stage_that_a_user_can_name():
    assert Fused not in STAGES.values()
    assert not hasattr(Pipeline, "fused")


def test_the_callers_list_stays_as_it_was():
    specs = [STREAM, DECODE, RRC]
    planned = fuse(specs)
    assert specs == [STREAM, DECODE, RRC]
    assert planned == fuse(specs)
    assert fuse([]) == []
