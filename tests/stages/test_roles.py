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
from shards import write_indexed

from wdskit import Pipeline, PipelineError, pack
from wdskit.codecs.fields import encode_field
from wdskit.errors import SampleError

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
    return write_indexed(path, {f"k{n}": FIELDS for n in (0, 1)})


@pytest.fixture(params=["exact", "stream"])
def source(request: pytest.FixtureRequest, folder: str) -> Pipeline:
    return getattr(Pipeline(), request.param)(folder)


def batch_of(pipe: Pipeline) -> Any:
    return next(iter(pipe.batched(2).loader(workers=0)))


def shapes(pipe: Pipeline) -> dict[Any, tuple[int, ...]]:
    batch = batch_of(pipe)
    items = enumerate(batch) if isinstance(batch, tuple) else batch.items()
    return {name: tuple(each.shape[1:]) for name, each in items if isinstance(each, torch.Tensor)}


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
