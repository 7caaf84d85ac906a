"""An image under any name is batched as (batch, channels, height, width); ambiguous values are refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import encoded, photo
from PIL import Image
from shards import write_shard

from wdskit import Pipeline, pack
from wdskit.codecs.fields import encode_field
from wdskit.errors import SampleError
from wdskit.shards.index import index_folder
from wdskit.stages.base import Origin

POINTS = np.arange(2 * 5 * 3, dtype=np.float32).reshape(2, 5, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("layouts")
    samples = {
        f"k{n}": {"png": encoded(photo() + np.uint8(n), "PNG"), "npy": encode_field("npy", POINTS)} for n in (0, 1)
    }
    write_shard(path / "s.tar", samples)
    index_folder(path, workers=1)
    return str(path)


@pytest.fixture(params=["exact", "stream"])
def source(request: pytest.FixtureRequest, folder: str) -> Pipeline:
    return getattr(Pipeline(), request.param)(folder)


def batch_of(pipe: Pipeline) -> Any:
    return next(iter(pipe.batched(2).loader(workers=0)))


HANDED_ON = {
    "itself": lambda sample: {"image": sample["png"]},
    "mirrored": lambda sample: {"image": sample["png"][:, ::-1]},
    "cut": lambda sample: {"image": sample["png"][2:9, 3:9]},
    "popped": lambda sample: {**{name: value for name, value in sample.items() if name != "png"}, "x": sample["png"]},
    "tuple": lambda sample: (sample["png"], 1),
    "bare": lambda sample: sample["png"],
}


def image_in(batch: Any) -> Any:
    if isinstance(batch, dict):
        return batch.get("image", batch.get("x"))
    return batch[0] if isinstance(batch, tuple) else batch


@pytest.mark.parametrize("spec", ["rgb8", "rgb", "l8", "rgba8"])
@pytest.mark.parametrize("how", HANDED_ON)
def test_a_decoded_image_that_a_function_hands_on_is_one_under_any_name(source, how, spec):
    channels = {"l8": 1, "rgba8": 4}.get(spec, 3)
    size = (7, 6) if how == "cut" else (21, 34)
    pipe = source.decode(spec)
    image = image_in(batch_of(pipe.map(HANDED_ON[how])))
    assert image.shape == (2, channels, *size)
    if how == "itself":
        assert torch.equal(image, batch_of(pipe)["png"])
        twice = pipe.map(HANDED_ON[how]).map(lambda sample: {"again": sample["image"][::2], "and": sample["image"]})
        assert batch_of(twice)["again"].shape == (2, channels, 11, 34)
        seen: list[type] = []
        pipe = pipe.map(HANDED_ON[how]).map_dict(image=lambda image: seen.append(type(image)) or image)
        assert batch_of(pipe)["image"].shape == (2, channels, *size)
        assert set(seen) == {np.ndarray}


def test_an_image_behind_a_transform_is_one_under_any_name(source):
    base = source.decode("rgb8")
    for pipe in (base.resize([6, 8]), base.resize([6, 8], fields="png").normalize("imagenet")):
        assert batch_of(pipe.map(lambda sample: {"image": sample["png"]}))["image"].shape == (2, 3, 6, 8)
    made = base.map(lambda sample: {"image": sample["png"] // 2, "other": sample["png"] // 3})
    for settings in ({"fields": "image"}, {"fields": "image", "masks": "other"}, {"fields": "none;image"}):
        pipe = made.random_flip(**settings).to_dict("image")
        assert batch_of(pipe)["image"].shape == (2, 3, 21, 34)
        assert batch_of(pipe.rename(photo="image"))["photo"].shape == (2, 3, 21, 34)
        assert batch_of(pipe.to_tuple("image"))[0].shape == (2, 3, 21, 34)
    both = made.center_crop(8, fields="image other").to_tuple("other", "image")
    assert [tuple(each.shape) for each in batch_of(both)] == [(2, 3, 8, 8)] * 2


MADE = {
    "dict": lambda sample: {"image": sample["png"] // 2},
    "float": lambda sample: {"image": sample["png"] / 255.0},
    "tuple": lambda sample: (sample["png"] // 2, 1),
    "bare": lambda sample: sample["png"] // 2,
    "grey with an axis": lambda sample: {"image": sample["png"][..., :1] // 2},
    "points": lambda sample: {"points": sample["npy"] * 2},
}


@pytest.mark.parametrize("how", MADE)
def test_an_array_that_may_be_an_image_or_not_is_refused_with_the_ways_out(source, how):
    pipe = source.decode("rgb8").map(MADE[how])
    slot = {"tuple": "slot 0", "bare": "the value", "points": "`points`"}.get(how, "`image`")
    message = rf"batched: {slot} is an array \(.*\) of \w+ from a function.*\n.* image field.*npy field.*tensor"
    with pytest.raises(SampleError, match=message):
        batch_of(pipe)


def test_the_ways_out_work(source):
    base = source.decode("rgb8")
    named = batch_of(base.map(lambda sample: {"left.png": sample["png"] // 2, "p.npy": sample["npy"] * 2}))
    assert named["left.png"].shape == (2, 3, 21, 34)
    assert named["p.npy"].shape == (2, 2, 5, 3)
    renamed = batch_of(base.map(MADE["dict"]).rename(**{"x.jpg": "image"}))
    assert renamed["x.jpg"].shape == (2, 3, 21, 34)
    tensors = batch_of(base.map(lambda sample: {"points": torch.from_numpy(sample["npy"] * 2)}))
    assert tensors["points"].shape == (2, 2, 5, 3)


def test_arrays_of_npy_files_are_stacked_as_they_are_stored(source):
    base = source.decode("rgb8")
    for pipe in (
        base.to_dict("npy"),
        base.rename(points="npy").to_dict("points"),
        base.map(lambda sample: {"points": sample["npy"]}),
        base.map(lambda sample: {"points": sample["npy"][:, 1:]}),
        base.to_tuple("npy"),
        base.map(lambda sample: (sample["npy"],)),
        source.decode(only=["npy"]).to_dict("npy"),  # by columns, if possible
        source.decode(only=["npy"]).rename(points="npy").to_tuple("points"),
    ):
        batch = batch_of(pipe)
        (points,) = batch.values() if isinstance(batch, dict) else batch
        assert points.shape in {(2, 2, 5, 3), (2, 2, 4, 3)}


def test_arrays_that_can_be_no_image_are_stacked_as_they_are(source):
    made = {
        "a": np.zeros((4, 5)),
        "b": np.zeros((4, 5, 2), np.uint8),
        "c": np.zeros((4, 5, 3), np.int64),
        "d": np.zeros((2, 4, 5, 3), np.uint8),
        "e": np.zeros(3, np.uint8),
        "f": np.zeros((4, 5, 3), bool),
    }
    batch = batch_of(source.map(lambda _: dict(made)))
    assert {name: tuple(values.shape[1:]) for name, values in batch.items()} == {n: a.shape for n, a in made.items()}


def test_columns_and_samples_make_the_same_of_arrays(folder):
    for chosen in (["npy"], ["npy", "__key__"]):
        base = Pipeline().exact(folder).decode(only=["npy"])
        for pipe in (base.to_tuple(*chosen), base.to_dict(*chosen), base.rename(**{"x.png": "npy"}).to_dict("x.png")):
            one, other = batch_of(pipe), batch_of(pipe.map(lambda value: value))
            pairs = (
                zip(one.values(), other.values(), strict=True)
                if isinstance(one, dict)
                else zip(one, other, strict=True)
            )
            assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_named_tuples_of_functions_stay_what_they_are(folder, tmp_path: Path):
    from collections import namedtuple

    Pair = namedtuple("Pair", "image cls")  # noqa: PYI024
    pipe = Pipeline().exact(folder).decode("rgb8").map(lambda sample: Pair(sample["png"], 3))
    images, labels = batch_of(pipe.map(lambda pair: (pair.image, pair.cls)))
    assert images.shape == (2, 3, 21, 34)
    assert labels.tolist() == [3, 3]


# --- the mark follows the value

CLASSES = (np.indices((21, 34)).sum(axis=0) % 5 == 0) * np.uint8(200)
"""A mask of 0 and 200: blending would give other numbers."""


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Shards with a photograph, a mask, an image as an npy array and JSON in each sample."""
    path = tmp_path_factory.mktemp("masked")
    fields = {
        "jpg": encoded(photo(), "JPEG"),
        "seg.png": encoded(CLASSES, "PNG"),
        "npy": encode_field("npy", photo()[:10, :12]),
        "json": b'{"a": 1}',
    }
    write_shard(path / "s.tar", {f"k{n}": fields for n in (0, 1)})
    index_folder(path, workers=1)
    return str(path)


def is_mask(value: Any) -> bool:
    return {*np.unique(np.asarray(value)).tolist()} <= {0, 200}


RENAMED = {
    "rename": lambda pipe: pipe.rename(**{"label.png": "seg.png"}),
    "to_dict": lambda pipe: pipe.to_dict("seg.png").map(lambda s: {"label.png": s["seg.png"]}),
    "map": lambda pipe: pipe.map(lambda s: {"label.png": s["seg.png"]}),
    "rename to no image's name": lambda pipe: pipe.rename(label="seg.png").rename(**{"label.png": "label"}),
}


NUMBERED = {
    "other numbers": lambda mask: np.arange(256, dtype=np.uint8)[::-1][mask],
    "int64": lambda mask: mask.astype(np.int64),
    "one-hot": lambda mask: np.eye(7, dtype=np.uint8)[mask % 7],
    "crop": lambda mask: np.arange(256, dtype=np.uint8)[::-1][mask[:-3, 2:]],
}


@pytest.mark.parametrize("spec", ["rgb8", "l8", "pil"])
@pytest.mark.parametrize("how", NUMBERED)
def test_a_mask_whose_numbers_a_function_replaces_is_a_mask(masked, how, spec):
    """Also next to a grey image with the form of the mask."""
    pipe = Pipeline().exact(masked).decode("index", only="seg.png").decode(spec)
    pipe = pipe.map(lambda s: {**s, "seg.png": NUMBERED[how](s["seg.png"])})
    with pytest.raises(SampleError, match=r"normalize: `seg\.png` is a mask"):
        list(pipe.normalize("imagenet", fields="seg.png").loader(workers=0))


@pytest.mark.parametrize("kind", ["exact", "stream"])
@pytest.mark.parametrize("how", RENAMED)
def test_a_mask_that_is_renamed_before_it_is_decoded_is_never_blended(masked, how, kind):
    base = RENAMED[how](getattr(Pipeline(), kind)(masked)).decode("index", only="label.png")
    for pipe in (base.resize(16, fields="label.png"), base.random_resized_crop(9, fields="label.png")):
        assert all(is_mask(sample["label.png"]) for sample in pipe.loader(workers=0))
    with pytest.raises(SampleError, match=r"normalize: `label\.png` is a mask"):
        list(base.normalize("imagenet", fields="label.png").loader(workers=0))


MOVED = {
    "the same": lambda s: {**s, "other": s["seg.png"]},
    "a view": lambda s: {**s, "other": s["seg.png"][::-1]},
    "a copy": lambda s: {**s, "other": s["seg.png"].copy()},
    "a list": lambda s: dict([*s.items(), ("other", [s["seg.png"]][0])]),
    "in place": lambda s: s.update(other=s["seg.png"]) or s,
    "exchanged": lambda s: {"other": s["seg.png"], "seg.png": s["jpg"], "jpg": s["npy"]},
    "torch": lambda s: {"other": torch.from_numpy(s["seg.png"])},
}


@pytest.mark.parametrize("how", MOVED)
def test_a_mask_that_a_function_moves_or_copies_is_never_blended(masked, how):
    pipe = Pipeline().exact(masked).decode("index", only="seg.png").decode("rgb8").map(MOVED[how])
    for sample in pipe.resize(16, fields="other").loader(workers=0):
        assert is_mask(sample["other"])
    with pytest.raises(SampleError, match="`other` is a mask"):
        list(pipe.to_tensor(fields="other").loader(workers=0))


def test_a_mask_is_one_after_a_stage_that_took_it_for_one(masked):
    pipe = Pipeline().exact(masked).decode("l8").random_flip(0.5, fields="jpg", masks="seg.png")
    assert all(is_mask(sample["seg.png"]) for sample in pipe.resize(16, fields="seg.png").loader(workers=0))
    with pytest.raises(SampleError, match=r"`seg\.png` is a mask"):
        list(pipe.to_tensor(fields="seg.png").loader(workers=0))


@pytest.mark.parametrize("spec", ["rgb", "l", "torchrgb", "torch", "torchl", "rgba"])
def test_a_mask_that_a_decode_divides_is_refused(masked, spec):
    pipe = Pipeline().exact(masked).decode(spec).to_dict("jpg", "seg.png").rename(mask="seg.png")
    with pytest.raises(SampleError, match=r"`mask` cannot be a mask: `decode: \w+` divides .*\n.*only: seg\.png"):
        list(pipe.resize(8, fields="jpg", masks="mask").loader(workers=0))


def test_a_mask_that_was_blended_is_refused(masked):
    pipe = Pipeline().exact(masked).decode("l8", only=["jpg", "seg.png"]).resize([9, 9], fields="jpg seg.png")
    with pytest.raises(SampleError, match=r"`seg\.png` cannot be a mask: `resize` has blended its pixels"):
        list(pipe.random_flip(fields="jpg", masks="seg.png").loader(workers=0))


def test_colours_are_no_mask_in_grey(folder):
    pipe = Pipeline().exact(folder).decode("l8").rename(mask="png").map(lambda s: {**s, "png": s["mask"]})
    with pytest.raises(SampleError, match="`mask` cannot be a mask: `png` has colours"):
        list(pipe.random_flip(fields="png", masks="mask").loader(workers=0))


def test_layouts_follow_the_values_of_a_tuple(masked):
    base = Pipeline().exact(masked).decode("rgb8").resize([8, 9], fields="jpg").to_tuple("jpg", "npy")
    image, array = batch_of(base)
    assert (image.shape, array.shape) == ((2, 3, 8, 9), (2, 10, 12, 3))
    for function in (lambda t: (t[1], t[0]), lambda t: [*reversed(t)] and t[::-1]):
        other, one = batch_of(base.map(function))
        assert torch.equal(one, image)
        assert torch.equal(other, array)
    assert torch.equal(batch_of(base.map(lambda t: t[1:]))[0], array)
    assert torch.equal(batch_of(base.map(lambda t: {"png": t[1], "npy": t[0]}))["png"], array)
    assert torch.equal(batch_of(base.map(lambda t: (t[1].copy(), t[0].copy())))[0], array)


def test_a_new_array_at_the_place_of_an_image_is_refused_and_map_tuple_says_what_it_is(masked):
    base = Pipeline().exact(masked).decode("rgb8").resize([8, 9], fields="jpg").to_tuple("jpg", "npy")
    with pytest.raises(SampleError, match=r"slot 0 is an array .* from a function"):
        batch_of(base.map(lambda t: (t[0] // 2, t[1])))
    assert batch_of(base.map_tuple(lambda image: image // 2, lambda array: array * 2))[0].shape == (2, 3, 8, 9)
    grey = Pipeline().exact(masked).decode("l8", only="jpg").to_tuple("jpg")
    with pytest.raises(SampleError, match=r"slot 0 is an array .* from a function"):
        batch_of(grey.map(lambda t: (t[0] // 2,)))
    assert batch_of(grey.map_tuple(lambda image: image // 2))[0].shape == (2, 1, 21, 34)


def test_an_npy_array_under_the_name_of_an_image_is_stacked_until_an_image_stage_takes_it(masked):
    base = Pipeline().exact(masked).decode(only="npy").to_dict("npy").rename(**{"x.png": "npy"})
    assert batch_of(base)["x.png"].shape == (2, 10, 12, 3)
    with pytest.raises(SampleError, match="no image field in this sample"):
        batch_of(base.random_flip())
    for probability in (0.0, 1.0):
        assert batch_of(base.random_flip(probability, fields="x.png"))["x.png"].shape == (2, 3, 10, 12)
    aliased = base.map(lambda s: {**s, "same": s["x.png"]}).random_flip(0.0, fields="x.png")
    assert {name: tuple(v.shape) for name, v in batch_of(aliased).items()} == {
        "x.png": (2, 3, 10, 12),
        "same": (2, 10, 12, 3),
    }


TEMPLATE = photo()


def test_what_a_function_returns_in_one_pipeline_is_not_known_in_another(masked):
    image = Pipeline().exact(masked).decode("rgb8", only="jpg").to_dict("jpg").map_dict(jpg=lambda _: TEMPLATE)
    assert batch_of(image)["jpg"].shape == (2, 3, 21, 34)
    with pytest.raises(SampleError, match="`x` is an array"):
        batch_of(Pipeline().exact(masked).map(lambda _: {"x": TEMPLATE}))


def test_ragged_fields_of_a_tuple_are_those_that_were_named_or_an_error(masked):
    base = Pipeline().exact(masked).decode("rgb8", only=["jpg", "npy"])
    for pipe in (
        base.to_tuple("jpg", "npy").map(lambda t: t[::-1]),
        base.map(lambda s: (s["jpg"], s["npy"])),
        base.to_tuple("npy").map(lambda t: t[0]),
    ):
        with pytest.raises(SampleError, match=r"ragged: npy: the samples are (tuple|value)s from a function"):
            next(iter(pipe.batched(2, ragged="npy").loader(workers=0)))
    batch = next(iter(base.to_tuple("npy").map(lambda t: {"npy": t[0]}).batched(2, ragged="npy").loader(workers=0)))
    assert batch["npy"].offsets.tolist() == [0, 10, 20]
    kept = base.to_tuple("jpg", "npy").map_tuple(None, lambda a: a[:3]).batched(2, ragged="npy")
    assert next(iter(kept.loader(workers=0)))[1].offsets.tolist() == [0, 3, 6]


PARTS: dict[str, list[Any]] = {
    "nothing": [],
    "colours": [{"decode": {"images": "rgb8", "only": "seg.png"}}],
    "grey": [{"decode": {"images": "l8", "only": ["seg.png"]}}],
    "numbers": [{"decode": {"images": "index", "only": ["seg.png"]}}],
    "floats": [{"decode": {"images": "l", "only": ["seg.png"]}}],
    "npy renamed": [{"decode": {"only": "npy"}}, {"rename": {"y.png": "seg.png"}}, {"rename": {"seg.png": "npy"}}],
    "a mask": [{"decode": {"images": "l8", "only": ["jpg", "seg.png"]}}, {"random_flip": {"masks": "seg.png"}}],
    "drawn": [{"decode": {"images": "rgb8", "only": ["seg.png"]}}, {"random_flip": {"fields": "seg.png"}}],
    "drawn twice": [{"decode": "rgb8"}, *[{"random_flip": {"fields": "seg.png"}}] * 2],
}


def samples_of_part(masked: str, stages: list[Any], at: int, other: list[Any], size: list[int]) -> list[Any]:
    """Return the samples, or errors, of one part of a mixture, which has these stages and this place."""
    mixture = [{"shards": masked, "weight": 1, "stages": each} for each in (stages, other)]
    pipe = Pipeline().exact(mixture=mixture[::-1] if at else mixture, seed=3).resize(size, fields="seg.png")
    built = pipe.random_flip(fields="seg.png").with_epoch(12).build(rank=0, world_size=1)
    stages_of, found = built.stages[at], []
    for number in range(8):
        origin = Origin("s.tar", "k", 0, number, at)
        sample = {"jpg": FIELDS["jpg"], "seg.png": FIELDS["seg.png"], "npy": FIELDS["npy"]}
        try:
            value = stages_of.apply(sample, origin)["seg.png"]
            found.append((value.dtype, value.shape, value.tobytes()))
        except SampleError as err:
            found.append(str(err))
    return found


FIELDS = {
    "jpg": encoded(photo(), "JPEG"),
    "seg.png": encoded(CLASSES, "PNG"),
    "npy": encode_field("npy", photo()[:10, :12]),
}


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("kind", PARTS)
def test_a_part_of_a_mixture_gives_what_it_gives_beside_any_other(masked, kind, at):
    alone = samples_of_part(masked, PARTS[kind], at, [], [6, 7])
    assert any(len(each) == 3 for each in alone) or kind == "nothing"
    for other in PARTS.values():
        assert samples_of_part(masked, PARTS[kind], at, other, [6, 7]) == alone


def test_an_image_that_a_function_puts_in_place_of_a_mask_is_no_mask(masked):
    base = Pipeline().exact(masked).decode("index", only="seg.png").decode("torchrgb8")
    pipe = base.map(lambda s: {"seg.png": s["jpg"].flip(-1), "jpg": s["jpg"]})
    batch = batch_of(pipe.resize([9, 8], fields="seg.png jpg"))
    assert (batch["seg.png"].int() - batch["jpg"].flip(-1).int()).abs().max() <= 1


def test_a_mask_whose_numbers_a_decoder_scales_is_refused(tmp_path):
    """Also without `decode: index`, which has no form for such files."""
    white = io.BytesIO()
    Image.fromarray(np.array([[0, 5]], np.uint8)).save(white, "TIFF", tiffinfo={262: 0})
    forms = {"ppm": b"P5\n2 1\n15\n" + bytes([3, 15]), "tiff": white.getvalue()}
    for form, data in forms.items():
        pack([{"__key__": "a", f"seg.{form}": data}], tmp_path / form, validate="none")
        pipe = Pipeline().exact(str(tmp_path / form)).decode("l8").random_flip(0.5, masks=f"seg.{form}")
        with pytest.raises(SampleError, match=r"cannot be a mask: .* scaled or inverted.*\n.*Save such masks as PNG"):
            list(pipe.loader(workers=0))


def test_a_mask_in_a_tiff_of_few_bits_has_a_way_out(tmp_path):
    data = io.BytesIO()
    Image.fromarray(np.array([[3, 2, 1, 0]], np.uint8)).save(data, "TIFF")
    few_bits = bytearray(data.getvalue())
    entry = few_bits.index(b"\x02\x01\x03\x00\x01\x00\x00\x00")  # the tag BitsPerSample
    few_bits[entry + 8] = 2
    few_bits[-4] = 0b11100100  # the first byte of the pixels
    pack([{"__key__": "a", "seg.tiff": bytes(few_bits)}], tmp_path / "d", validate="none")
    base = Pipeline().exact(str(tmp_path / "d"))
    with pytest.raises(SampleError, match=r"has 2 bits per pixel.*\n  Put `decode: \{images: index, only: seg"):
        list(base.decode("l8").random_flip(0.5, masks="seg.tiff").loader(workers=0))
    [sample] = base.decode("index", only="seg.tiff").loader(workers=0)
    assert sample["seg.tiff"].tolist() == [[3, 2, 1, 0]]


def test_a_new_image_with_other_channels_stays_an_image(masked):
    """Also next to an array with these channels."""
    pipe = Pipeline().exact(masked).decode("index", only="seg.png").decode("rgb8")
    pipe = pipe.map(lambda s: {**s, "depth": np.zeros((5, 5, 1), np.uint8)})
    pipe = pipe.map(lambda s: {**s, "jpg": s["jpg"].mean(axis=2, keepdims=True).astype(np.uint8)})
    for sample in pipe.random_flip(0.5, fields="jpg").loader(workers=0):
        assert sample["jpg"].shape[2] == 1


@pytest.mark.parametrize(
    "change", [lambda mask: mask.argmax(axis=2), lambda mask: mask.max(axis=(1, 2)), lambda mask: mask[None] + 1]
)
def test_a_mask_may_get_any_number_of_axes_next_to_a_value_of_the_same_form(masked, change):
    def one_hot(sample):
        mask = np.eye(7, dtype=np.int64)[sample["seg.png"] % 7]
        return {**sample, "seg.png": mask, "other": change(mask) + 5}

    pipe = Pipeline().exact(masked).decode("index", only="seg.png").map(one_hot)
    for sample in pipe.map(lambda s: {**s, "seg.png": change(s["seg.png"])}).loader(workers=0):
        assert np.array_equal(sample["seg.png"] + 5, sample["other"])
