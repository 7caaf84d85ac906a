"""What a batch holds in a slot follows from the names in the pipeline, and a mask is known by its name."""

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

from wdskit import Pipeline, PipelineError, Ragged, pack
from wdskit.codecs.fields import encode_field
from wdskit.errors import SampleError
from wdskit.shards.index import index_folder
from wdskit.stages.base import Origin

POINTS = np.arange(2 * 5 * 3, dtype=np.float32).reshape(2, 5, 3)
CLASSES = (np.indices((21, 34)).sum(axis=0) % 5 == 0) * np.uint8(200)
"""A mask of 0 and 200: blending would give other numbers."""
FIELDS = {
    "jpg": encoded(photo(), "PNG"),
    "seg.png": encoded(CLASSES, "PNG"),
    "npy": encode_field("npy", POINTS),
    "json": b'{"boxes": [[1, 2, 3, 4]], "a": 1}',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("roles")
    write_shard(path / "s.tar", {f"k{n}": FIELDS for n in (0, 1)})
    index_folder(path, workers=1)
    return str(path)


@pytest.fixture(params=["exact", "stream"])
def source(request: pytest.FixtureRequest, folder: str) -> Pipeline:
    return getattr(Pipeline(), request.param)(folder)


def batch_of(pipe: Pipeline) -> Any:
    return next(iter(pipe.batched(2).loader(workers=0)))


def shapes(pipe: Pipeline) -> dict[Any, tuple[int, ...]]:
    batch = batch_of(pipe)
    items = enumerate(batch) if isinstance(batch, tuple) else batch.items()
    return {name: tuple(each.shape[1:]) for name, each in items if isinstance(each, torch.Tensor)}


def test_a_slot_is_an_image_by_its_name_by_a_rename_or_by_an_image_stage(source: Pipeline) -> None:
    base = source.decode("rgb8", only=["jpg", "npy"]).to_dict("jpg", "npy")
    image, array = (3, 21, 34), (2, 5, 3)
    assert shapes(base) == {"jpg": image, "npy": array}
    assert shapes(base.rename(photo="jpg", points="npy")) == {"photo": image, "points": array}
    assert shapes(base.rename(photo="jpg").rename(again="photo").to_tuple("npy", "again")) == {0: array, 1: image}
    assert shapes(base.rename(**{"x.png": "npy"})) == {"jpg": image, "x.png": (3, 2, 5)}
    assert shapes(base.random_flip(fields="npy")) == {"jpg": image, "npy": (3, 2, 5)}
    assert shapes(base.rename(photo="jpg").map(lambda s: {"photo": s["photo"][2:9] // 2})) == {"photo": (3, 7, 34)}
    assert shapes(base.map(lambda s: {"photo": s["jpg"], "l.png": s["jpg"]})) == {"photo": (21, 34, 3), "l.png": image}
    assert shapes(base.to_tuple("x;jpg", "npy").map_tuple(lambda i: i // 2)) == {0: image, 1: array}
    assert shapes(base.to_tuple("jpg", "npy").map(lambda t: (t[0] // 2, t[1], t[1]))) == {0: image, 1: array, 2: array}
    assert shapes(base.map(lambda s: (s["jpg"], 1))) == {0: (21, 34, 3), 1: ()}


def test_columns_and_samples_make_the_same_of_arrays(folder: str) -> None:
    base = Pipeline().exact(folder).to_dict("npy", "__key__").decode(only=["npy"])
    for pipe in (base, base.to_tuple("npy"), base.rename(**{"x.png": "npy"}), base.rename(points="npy")):
        assert shapes(pipe) == shapes(pipe.map(lambda value: value))


@pytest.mark.parametrize(
    "value", [np.zeros(3), np.zeros((1, 2, 3, 4)), torch.zeros(5), np.zeros((), np.uint8)], ids=lambda v: str(v.shape)
)
def test_what_has_no_shape_of_an_image_is_an_error_under_its_name_only(source: Pipeline, value: Any) -> None:
    message = rf"`photo` has the shape {tuple(value.shape)}, but `photo` is an image: .*\n.*another name".replace(
        "(", r"\("
    ).replace(")", r"\)")
    base = source.decode("rgb8", only="jpg").rename(photo="jpg")
    with pytest.raises(SampleError, match=message):
        batch_of(base.map_dict(photo=lambda _: value))
    with pytest.raises(SampleError, match="slot 0 has the shape"):
        batch_of(base.to_tuple("photo").map_tuple(lambda _: value))
    assert shapes(base.map(lambda _: {"heat": value})) == {"heat": tuple(value.shape)}


def test_lists_of_json_are_ragged_under_any_name(source: Pipeline) -> None:
    lengths = iter([1, 3] * 9)
    base = source.decode().map_dict(json=lambda found: {"boxes": found["boxes"] * next(lengths)})
    for pipe in (base.to_tuple("json.boxes"), base.rename(b="json.boxes").to_tuple("b"), base.to_dict("json.boxes")):
        batch = batch_of(pipe)
        [boxes] = batch.values() if isinstance(batch, dict) else batch
        assert isinstance(boxes, Ragged)
        assert boxes.offsets.tolist() == [0, 1, 4]


def test_ragged_fields_are_those_of_a_dict_or_of_the_places_of_to_tuple(source: Pipeline) -> None:
    base = source.decode("rgb8", only=["jpg", "npy"])
    for pipe in (base.map(lambda s: (s["jpg"], s["npy"])), base.to_tuple("npy").map(lambda t: t[0])):
        with pytest.raises(SampleError, match="ragged: no field `npy`; the samples have: none"):
            next(iter(pipe.batched(2, ragged="npy").loader(workers=0)))
    kept = base.to_tuple("jpg", "npy").map_tuple(None, lambda a: a[:1]).batched(2, ragged="npy")
    assert next(iter(kept.loader(workers=0)))[1].offsets.tolist() == [0, 1, 2]


# --- masks


def is_mask(value: Any) -> bool:
    return {*np.unique(np.asarray(value)).tolist()} <= {0, 200}


RENAMED = {
    "rename": lambda pipe: pipe.rename(**{"label.png": "seg.png"}),
    "map": lambda pipe: pipe.map(lambda s: {"label.png": s["seg.png"]}),
    "twice": lambda pipe: pipe.rename(label="seg.png").rename(**{"label.png": "label"}),
}


@pytest.mark.parametrize("how", RENAMED)
def test_a_mask_that_is_renamed_before_it_is_decoded_is_never_blended(source: Pipeline, how: str) -> None:
    base = RENAMED[how](source).decode("index", only="label.png")
    for pipe in (base.resize(16, fields="label.png"), base.random_resized_crop(9, fields="label.png")):
        assert all(is_mask(sample["label.png"]) for sample in pipe.loader(workers=0))
    with pytest.raises(SampleError, match=r"normalize: `label\.png` is a mask"):
        list(base.normalize("imagenet", fields="label.png").loader(workers=0))


AFTER: dict[str, Any] = {
    "rename": lambda pipe: pipe.rename(other="seg.png"),
    "map": lambda pipe: pipe.map(lambda s: {**s, "seg.png": 200 - s["seg.png"]}).rename(other="seg.png"),
    "map_dict": lambda pipe: pipe.map_dict(**{"seg.png": lambda mask: mask.astype(np.int64)}).rename(other="seg.png"),
    "masks": lambda pipe: pipe.map(lambda s: {**s, "other": s["seg.png"]}).random_flip(fields="jpg", masks="other"),
    "to_dict": lambda pipe: pipe.to_dict("x;seg.png").rename(other="x"),
}


@pytest.mark.parametrize("how", AFTER)
def test_a_mask_stays_one_under_the_names_that_stages_give_it(source: Pipeline, how: str) -> None:
    pipe = AFTER[how](source.decode("index", only="seg.png").decode("rgb8", only="jpg"))
    assert all(is_mask(sample["other"]) for sample in pipe.resize(16, fields="other").loader(workers=0))
    with pytest.raises(SampleError, match="`other` is a mask"):
        list(pipe.to_tensor(fields="other").loader(workers=0))


COLOURED: dict[str, Any] = {
    "decode": lambda pipe: pipe.decode("rgb8"),
    "decode only": lambda pipe: pipe.decode("l8", only=["jpg", "seg.png"]),
    "float": lambda pipe: pipe.decode("rgb"),
}  # fmt: skip


@pytest.mark.parametrize("how", COLOURED)
@pytest.mark.parametrize("name", ["seg.png", "mask"])
def test_what_a_stage_made_colours_of_is_refused_as_a_mask_before_the_run(
    source: Pipeline, how: str, name: str
) -> None:
    pipe = COLOURED[how](source) if name == "seg.png" else COLOURED[how](source).rename(mask="seg.png")
    message = rf"resize: `none;{name}` cannot be a mask: .*\n  Put `decode: {{images: index, only: "
    with pytest.raises(PipelineError, match=message):
        pipe.resize(8, fields="jpg", masks=f"none;{name}").loader(workers=0)
    # What a function made may be one.
    own = pipe.map(lambda s: {**s, name: CLASSES}).resize(8, fields="jpg", masks=name)
    assert all(is_mask(sample[name]) for sample in own.loader(workers=0))


def test_a_new_mask_with_the_name_of_an_image_is_taken(source: Pipeline) -> None:
    pipe = source.decode("rgb8").map(lambda s: {"jpg": s["jpg"], "new.png": CLASSES})
    for sample in pipe.resize(8, masks="new.png").loader(workers=0):
        assert is_mask(sample["new.png"])
        assert sample["jpg"].shape[:2] == sample["new.png"].shape


PARTS: dict[str, list[Any]] = {
    "nothing": [],
    "colours": [{"decode": {"images": "rgb8", "only": "seg.png"}}],
    "grey": [{"decode": {"images": "l8", "only": ["seg.png"]}}],
    "numbers": [{"decode": {"images": "index", "only": ["seg.png"]}}],
    "npy renamed": [{"decode": {"only": "npy"}}, {"rename": {"y.png": "seg.png"}}, {"rename": {"seg.png": "npy"}}],
    "drawn": [{"decode": {"images": "rgb8", "only": ["seg.png"]}}, {"random_flip": {"fields": "seg.png"}}],
}


def samples_of_part(folder: str, stages: list[Any], at: int, other: list[Any]) -> list[Any]:
    """Return the samples, or errors, of one part of a mixture, which has these stages and this place."""
    mixture = [{"shards": folder, "weight": 1, "stages": each} for each in (stages, other)]
    pipe = Pipeline().exact(mixture=mixture[::-1] if at else mixture, seed=3).resize([6, 7], fields="seg.png")
    built = pipe.random_flip(fields="seg.png").with_epoch(12).build(rank=0, world_size=1)
    found = []
    for number in range(4):
        try:
            value = built.stages[at].apply(dict(FIELDS), Origin("s.tar", "k", 0, number, at))["seg.png"]
            found.append((value.dtype, value.shape, value.tobytes()))
        except SampleError as err:
            found.append(str(err))
    return found


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("kind", PARTS)
def test_a_part_of_a_mixture_gives_what_it_gives_beside_any_other(folder: str, kind: str, at: int) -> None:
    alone = samples_of_part(folder, PARTS[kind], at, [])
    assert any(len(each) == 3 for each in alone) or kind == "nothing"
    for other in PARTS.values():
        assert samples_of_part(folder, PARTS[kind], at, other) == alone


def test_a_mask_in_a_tiff_of_few_bits_is_decoded_by_index(tmp_path: Path) -> None:
    data = io.BytesIO()
    Image.fromarray(np.array([[3, 2, 1, 0]], np.uint8)).save(data, "TIFF")
    few_bits = bytearray(data.getvalue())
    entry = few_bits.index(b"\x02\x01\x03\x00\x01\x00\x00\x00")  # the tag BitsPerSample
    few_bits[entry + 8] = 2
    few_bits[-4] = 0b11100100  # the first byte of the pixels
    pack([{"__key__": "a", "seg.tiff": bytes(few_bits)}], tmp_path / "d", validate="none")
    [sample] = Pipeline().exact(str(tmp_path / "d")).decode("index", only="seg.tiff").loader(workers=0)
    assert sample["seg.tiff"].tolist() == [[3, 2, 1, 0]]
