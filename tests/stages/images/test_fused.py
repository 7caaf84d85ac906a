"""Decode and crop in one fused step: which stages are fused, equal results of fused and single stages, batches and
pipelines; the difference of its pixels, also from Pillow's.
"""

from __future__ import annotations

import io
import re
from itertools import product

import numpy as np
import pytest
import torch
from images import EXTRANEOUS, FILES, encoded, palette_image, photo, pixels
from PIL import Image

from wdskit.codecs.structure import ImageHeader
from wdskit.errors import ImageTooLarge, PipelineError, SampleError
from wdskit.stages.base import Context, bind_steps
from wdskit.stages.fields import Decode, Map, ToTuple
from wdskit.stages.images import fused as fused_module
from wdskit.stages.images.fused import FusedStages, FusedStep, fuse
from wdskit.stages.images.transforms import (
    CenterCrop,
    Normalize,
    RandomFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
    draw_crop,
)
from wdskit.stages.run import Origin, RankInfo, Run, SampleStages
from wdskit.stages.streaming import Shuffle, Stream

SPECS = ["rgb8", "rgb"]
CROPS = {
    "random": [RandomResizedCrop(size=12)],
    "random wide": [RandomResizedCrop(size=[7, 15], scale=[0.3, 0.9])],
    "resize": [Resize(size=14)],
    "resize both": [Resize(size=[11, 18])],
    "middle": [Resize(size=14), CenterCrop(size=12)],
    "middle padded": [Resize(size=8), CenterCrop(size=[12, 6])],
}
FLIP, NORMALIZE, TENSOR = RandomFlip(), Normalize(preset="imagenet"), ToTensor()
ENDINGS = {
    "": [],
    "flip": [FLIP],
    "normalize": [Normalize(mean=[0.4], std=[0.3])],
    "tensor": [TENSOR],
    "flip normalize tensor": [FLIP, NORMALIZE, TENSOR],
}


def each_of(*specs, fuse=True, images="rgb8", **options):
    """Return the running one-to-one stages; check whether they contain the fused step."""
    decode = Decode(images=images, fuse=fuse, **options)
    steps, _ = bind_steps(fused_module.fuse([decode, *specs]), Context(Run(RankInfo(0, 1), 3), {}.__getitem__))
    each = SampleStages(steps)
    assert fuse == any(isinstance(step.function, FusedStep) for step in each.steps)
    return each


def at(number=0):
    """Return the origin of sample `number`."""
    return Origin("a.tar", f"k{number}", 5, number, 0)


def results(each, sample, count=1):
    """Return the results for one sample at each of `count` positions."""
    return [each.apply(dict(sample), at(number)) for number in range(count)]


def assert_same(one, other, atol=0.0):
    """Check that two samples have equal fields, types, dtypes, memory layouts and, within `atol`, values."""
    assert list(one) == list(other)
    for field in one:
        a, b = one[field], other[field]
        assert type(a) is type(b)
        if not isinstance(a, (np.ndarray, torch.Tensor)):
            assert a == b
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if isinstance(a, torch.Tensor):
            assert a.stride() == b.stride()
        else:
            assert a.flags.c_contiguous
            assert a.flags.writeable
        assert np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max() <= atol


PICTURE = encoded(pixels(30, 40, 3), "PNG")


@pytest.mark.parametrize("images", SPECS)
@pytest.mark.parametrize("ending", sorted(ENDINGS))
@pytest.mark.parametrize("crop", sorted(CROPS))
def test_one_step_gives_what_the_stages_give(crop, ending, images):
    """Results are equal to the bit if pixels are uint8 until the end. Float images are resized as uint8, so they differ
    by up to one level.
    """
    specs = [*CROPS[crop], *ENDINGS[ending]]
    one, apart = each_of(*specs, images=images), each_of(*specs, images=images, fuse=False)
    level = 1 / 255 / (0.225 if any(spec.name == "normalize" for spec in specs) else 1)
    atol = 0 if images.endswith("8") else level
    for name in ("jpeg", "jpeg 4:4:4", "png", "webp"):
        sample = {"__key__": "a", "cls": b"7", "jpg": FILES[name], "json": b"{}", "bin": b"x"}
        for a, b in zip(results(one, sample, 6), results(apart, sample, 6), strict=True):
            assert_same(a, b, atol + 1e-6 * (atol > 0))


# --- every kind of file, as in the stage decode


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


SMALL = [RandomResizedCrop(size=2, scale=[0.5, 1.0])]  # of 21x34: scales 1/2, 1/4, 1/8


def failure(each, sample):
    with pytest.raises((SampleError, PipelineError)) as caught:
        each.apply(sample, at())
    err = caught.value
    return type(err), str(err), getattr(err, "stage", None), type(err.__cause__), getattr(err.__cause__, "field", None)


@pytest.mark.parametrize("name", ["jpeg", "jpeg progressive", "jpeg grey", "jpeg cmyk", "png", "webp"])
def test_every_truncated_file_gives_the_same_error(name):
    """The file is cut at every byte, for all scales: a missing part is found even if none of its pixels is wanted."""
    one, apart = each_of(*SMALL), each_of(*SMALL, fuse=False)
    for cut in range(0, len(FILES[name]), 1 if name.startswith("jpeg") else 7):
        sample = {"cls": b"1", "jpg": FILES[name][:cut]}
        assert failure(one, sample) == failure(apart, sample)


def test_the_limit_is_the_same():
    for name in ("jpeg", "jpeg cmyk", "png"):
        for is_fused in (True, False):
            with pytest.raises(SampleError, match="decode failed: the image's header states") as caught:
                each_of(*SMALL, fuse=is_fused, max_pixels=30).apply({"jpg": FILES[name]}, at())
            assert isinstance(caught.value.__cause__, ImageTooLarge)


def test_what_fails_behind_decoding_is_the_crops_error(monkeypatch):
    def fail(*args, **options):
        raise MemoryError("no room")

    for is_fused in (True, False):
        each = each_of(*CROPS["random"], fuse=is_fused)
        monkeypatch.setattr(torch.nn.functional, "interpolate", fail)
        with pytest.raises(SampleError, match=r"a.tar: k0: random_resized_crop failed: MemoryError: no room") as caught:
            each.apply({"jpg": FILES["png"]}, at())
        monkeypatch.undo()
        assert caught.value.stage == "random_resized_crop"
        assert isinstance(caught.value.__cause__, MemoryError)


# --- which field


@pytest.mark.parametrize(
    "sample",
    [
        {"left.JPG": PICTURE, "txt": b"a"},
        {"jpg": PICTURE, "png": PICTURE},
        {"jpg": PICTURE, "png": np.zeros((4, 4, 3), np.uint8)},
        {"jpg": np.zeros((40, 50, 3), np.uint8), "cls": b"3"},
        {"jpg": Image.new("RGB", (40, 50))},
        {"cls": b"3"},
        {"__x.jpg": PICTURE, "jpg": PICTURE},
        {"jpg": "text"},
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


def test_a_decoder_of_another_size_than_the_header_draws_again(monkeypatch):
    monkeypatch.setattr(
        fused_module, "colour_jpeg_header", lambda data, max_pixels: ImageHeader("JPEG", 700, 500, "RGB")
    )
    one, apart = (
        each_of(*CROPS["random"], fuse=is_fused).apply({"jpg": FILES["jpeg"]}, at(1)) for is_fused in (True, False)
    )
    assert_same(one, apart)


# --- into a batch


@pytest.mark.parametrize("images", SPECS)
@pytest.mark.parametrize("ending", sorted(ENDINGS))
def test_what_is_written_into_a_batch_is_the_value_itself(images, ending):
    each = each_of(*CROPS["random wide"], *ENDINGS[ending], images=images)
    step = each.steps[0].function
    batch = np.empty((3, 7, 15, 3), step.dtype).transpose(0, 3, 1, 2)
    for number in range(8):
        batch.fill(77)
        sample = {"jpg": FILES["jpeg"], "cls": b"1"}
        out = batch[1:2]
        written = step(sample, at(number), out)
        assert written["jpg"] is out
        assert written["cls"] == 1
        value = step(sample, at(number))["jpg"]
        expected = value.numpy() if isinstance(value, torch.Tensor) else value.transpose(2, 0, 1)
        assert expected.dtype == batch.dtype
        assert np.abs(out - expected).max() <= (1e-6 if batch.dtype == np.float32 else 0)
        assert (batch[0] == 77).all()
        assert (batch[2] == 77).all()


# --- differences


# --- compared with Pillow's decode, crop and resize: every kind of file within one level


SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def rgb_of(data):
    """Return the RGB pixels that Pillow decodes; of 16 bits, which Pillow would clip, the upper 8."""
    image = Image.open(io.BytesIO(data))
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    return image.convert("RGBA").convert("RGB") if image.mode == "P" else image.convert("RGB")


def compare(data, size, count=2, decoded=None):
    """Return the largest difference in levels over some positions, mirrored and not, decoded at full scale."""
    step = each_of(RandomResizedCrop(size=size), RandomFlip(p=0.5)).steps[0].function
    image = decoded or rgb_of(data)
    worst = 0
    for number in range(count):
        rng, flip = (move.rng_at(at(number)) for move in step.moves)
        top, left, height, width = draw_crop(rng, image.height, image.width, SCALE, RATIO)
        part = image.crop((left, top, left + width, top + height)).resize(size[::-1], Image.Resampling.BILINEAR)
        if flip.random() < 0.5:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        batch = np.empty((2, *size, 3), np.uint8)
        step({"jpg": data}, at(number), batch.transpose(0, 3, 1, 2)[1:2])
        result = batch[1]
        worst = max(worst, int(np.abs(result.astype(int) - np.asarray(part)).max()))
    return worst


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_every_kind_of_file_is_within_one_level_of_pillow(name):
    for size in ((48, 48), (33, 61)):
        assert compare(WHOLE[name], size, count=6) <= 1


def test_four_one_one_is_within_one_level_of_its_own_pixels():
    """Pillow cannot write 4:1:1, simplejpeg can. Both decode it to the same pixels."""
    import simplejpeg

    for subsampling in ("411", "440", "420", "422", "444"):
        data = simplejpeg.encode_jpeg(photo(40, 56), 90, "RGB", subsampling)
        assert compare(data, (48, 48), count=6) <= 1


def test_every_small_size_is_within_one_level_of_pillow():
    """Sizes are 1x1 to 17x17, all enlarged: an image of one pixel has a crop too."""
    for height, width in product(range(1, 18), range(1, 18)):
        data = encoded(photo(height, width), "JPEG", quality=95)
        assert compare(data, (19, 23), count=1) <= 1


def test_an_image_that_needs_no_resize_is_its_pixels():
    """The result does not share a thread's memory: the next image does not change it."""
    each = each_of(Resize(size=[21, 34]))
    first = each.apply({"jpg": FILES["jpeg"]}, at())["jpg"]
    kept = first.copy()
    each.apply({"jpg": encoded(pixels(21, 34, 3), "JPEG")}, at(1))
    assert np.array_equal(first, kept)
    assert np.array_equal(first, np.asarray(rgb_of(FILES["jpeg"])))


# --- which groups of stages are fused


OTHERS = {
    "source": Stream(shards="a.tar"),
    "shuffle": Shuffle(size=9),
    "decode": Decode(images="rgb8"),
    "float": Decode(images="rgb"),
    "plain": Decode(),
    "unfused": Decode(images="rgb8", fuse=False),
    "rrc": RandomResizedCrop(size=224),
    "rrc of jpg": RandomResizedCrop(size=224, fields="jpg"),
    "rrc of two": RandomResizedCrop(size=224, fields="left.jpg right.jpg"),
    "rrc with mask": RandomResizedCrop(size=224, masks="seg.png"),
    "resize": Resize(size=256),
    "center": CenterCrop(size=224),
    "flip": FLIP,
    "flip of jpg": RandomFlip(fields="jpg"),
    "normalize": NORMALIZE,
    "tensor": TENSOR,
    "map": Map(fn="my_augment"),
    "tuple": ToTuple(fields=["jpg;png", "cls"]),
}
GROUPS = [
    # Stages; those in brackets are fused.
    "source shuffle [decode resize center flip normalize tensor] tuple",
    "source [float rrc flip normalize tensor] map tuple",
    "[decode rrc] map flip normalize",
    "[decode rrc normalize] flip",
    "[decode resize] flip of jpg",
    "[decode rrc of jpg flip of jpg] normalize",
    "[decode rrc] [decode rrc]",
    "decode map rrc",
    "decode flip rrc",
    "plain rrc",
    "unfused rrc normalize",
    "decode rrc with mask flip",
    "decode rrc of two flip",
]


@pytest.mark.parametrize("text", GROUPS)
def test_stages_that_are_fused_follow_one_another_and_name_one_field(text):
    names = "|".join(sorted(OTHERS, key=len, reverse=True))
    groups = [re.findall(names, group) for group in re.findall(rf"\[[^]]+\]|{names}", text)]
    planned = fuse([OTHERS[name] for group in groups for name in group])
    found = [item.stages if isinstance(item, FusedStages) else (item,) for item in planned]
    assert [[*stages] for stages in found] == [[OTHERS[name] for name in group] for group in groups]
