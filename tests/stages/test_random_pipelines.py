"""Random pipelines are compared with PIL, numpy and tarfile, value by value; the reference knows each value's origin.

A pipeline decodes, moves, copies, drops, changes and batches values in any order. `WDSKIT_ALL_SOAK` runs 3,000 of them.
"""

from __future__ import annotations

import dataclasses
import io
import os
import random
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import encoded, photo
from PIL import Image
from shards import write_shard

from wdskit import Pipeline, WdskitError
from wdskit.codecs.fields import encode_field
from wdskit.pipeline import build
from wdskit.shards.index import index_folder
from wdskit.stages import base, collate, fields
from wdskit.stages.images import geometry
from wdskit.stages.marks import layout_of, marked

COUNT = 3000 if os.environ.get("WDSKIT_ALL_SOAK") else 60
SIZE = (20, 26)
MOVES = ("same", "copied", "mirrored")


@dataclass(frozen=True)
class Value:
    """One value of the reference.

    Attributes:
        kind: "image", "mask", "array" or "number"; before decoding "bytes".
        data: Array (height, width[, channels]), or a number, or the bytes.
        of: For bytes, the kind after decoding.
        near: Levels by which PIL and torch may differ, from resizing.
    """

    kind: str
    data: Any
    of: str = ""
    near: int = 0


@dataclass
class Drawn:
    """A random pipeline, and its reference: the effect of each stage on the values of a sample."""

    stages: list[Callable[[Pipeline], Pipeline]] = field(default_factory=list)
    steps: list[Callable[[dict[str, Value]], dict[str, Value]]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def add(self, text: str, stage: Callable[[Pipeline], Pipeline], step: Callable[[Any], Any]) -> None:
        self.text.append(text)
        self.stages.append(stage)
        self.steps.append(step)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two folders of three samples: a mask, a photograph, an array that looks like an image, a number."""
    made = []
    for part in range(2):
        path = tmp_path_factory.mktemp("random")
        rng = np.random.default_rng(part)
        samples = {}
        for number in range(3):
            ids = rng.integers(0, 2, SIZE, dtype=np.uint8) * np.uint8(200)
            samples[f"p{part}k{number}"] = {
                "jpg": encoded(photo(*SIZE) + np.uint8(7 * number + part), "PNG"),  # a PNG, which is lossless
                "seg.png": encoded(ids, "PNG"),
                "npy": encode_field("npy", rng.integers(0, 256, (*SIZE, 3), dtype=np.uint8)),
                "cls": b"%d" % (10 * part + number),
            }
        write_shard(path / "s.tar", samples)
        index_folder(path, workers=1)
        made.append(str(path))
    return made


def read(folder: str) -> dict[str, dict[str, Value]]:
    """Return the samples of a folder, read by tarfile."""
    kinds = {"jpg": "image", "seg.png": "mask", "npy": "array", "cls": "number"}
    found: dict[str, dict[str, Value]] = {}
    with tarfile.open(Path(folder) / "s.tar") as tar:
        for member in tar:
            key, _, name = member.name.partition(".")
            file = tar.extractfile(member)
            assert file is not None
            found.setdefault(key, {})[name] = Value("bytes", file.read(), kinds[name])
    return found


def decoded(value: Value, spec: str) -> Value:
    if value.kind != "bytes":
        return value
    if value.of == "number":
        return Value("number", int(value.data))
    if value.of == "array":
        return Value("array", np.load(io.BytesIO(value.data)))
    image = Image.open(io.BytesIO(value.data))
    if value.of == "mask":
        return Value("mask", np.array(image).astype(np.int32))
    return Value("image", np.array(image.convert("L" if spec.endswith("l8") else "RGB")))


def resized(value: Value, size: tuple[int, int]) -> Value:
    if value.data.shape[:2] == size:
        return value
    if value.kind == "mask":
        rows, columns = ((2 * np.arange(n) + 1) * old // (2 * n) for n, old in zip(size, value.data.shape, strict=True))
        return dataclasses.replace(value, data=value.data[rows][:, columns])
    image = Image.fromarray(value.data).resize(size[::-1], Image.Resampling.BILINEAR)
    return Value("image", np.array(image), near=value.near + 1)


def cropped(value: Value, size: tuple[int, int]) -> Value:
    top, left = (round((old - new) / 2) for old, new in zip(value.data.shape, size, strict=False))
    return dataclasses.replace(value, data=value.data[top : top + size[0], left : left + size[1]])


def mirrored(value: Value) -> Value:
    return dataclasses.replace(value, data=value.data[:, ::-1])


class Moved:
    """A user's function that moves values to new names or places, as the same objects, copies or views."""

    def __init__(self, items: list[tuple[Any, Any, str]], *, is_tuple: bool) -> None:
        self.items = items
        self.is_tuple = is_tuple

    def __call__(self, sample: Any) -> Any:
        found = [(new, self.moved(sample[old], how)) for new, old, how in self.items]
        if self.is_tuple:
            return tuple(value for _, value in found)
        return {"__key__": sample["__key__"], **dict(found)}

    @staticmethod
    def moved(value: Any, how: str) -> Any:
        if how == "same" or not isinstance(value, (np.ndarray, torch.Tensor)):
            return value
        is_array = isinstance(value, np.ndarray)
        if how == "copied":
            return value.copy() if is_array else value.clone()
        return value[:, ::-1] if is_array else value.flip(-1)


def draw(rng: random.Random, first: dict[str, Value]) -> Drawn:
    """Return a random pipeline for samples like `first`, whose names, kinds and sizes the draw uses."""
    drawn, now = Drawn(), dict(first)
    spec = rng.choice(["rgb8", "l8", "torchrgb8"])
    names = {"image": ["left.png", "b.jpg", "photo"], "mask": ["seg.png", "m.png", "ids"], "array": ["x.npy", "y"]}

    def apply(text: str, stage: Any, step: Any) -> None:
        drawn.add(text, stage, step)
        nonlocal now
        now = step(now)

    def rename(picked: dict[str, str]) -> None:
        def step(values: dict[str, Value]) -> dict[str, Value]:
            kept = {name: value for name, value in values.items() if name not in picked.values()}
            return kept | {new: values[old] for new, old in picked.items()}

        apply(f"rename {picked}", lambda pipe: pipe.rename(**picked), step)

    if rng.random() < 0.5:
        rename({rng.choice(["m.png", "label.png"]): "seg.png"})
    if rng.random() < 0.3:
        rename({"z.npy": "npy"})
    mask_name = next(name for name, value in now.items() if value.of == "mask")

    def decode(values: dict[str, Value], only: str | None) -> dict[str, Value]:
        return {name: value if only and name != only else decoded(value, spec) for name, value in values.items()}

    apply("index", lambda pipe: pipe.decode("index", only=mask_name), lambda values: decode(values, mask_name))
    apply(spec, lambda pipe: pipe.decode(spec), lambda values: decode(values, None))
    for _ in range(rng.randint(1, 6)):
        images = [name for name, value in now.items() if value.kind in {"image", "mask"}]
        choice = rng.choice(["resize", "crop", "flip", "rename", "map", "map", "to_dict"])
        if choice in {"resize", "crop", "flip"} and images:
            picked = rng.sample(images, rng.randint(1, len(images)))
            masks = [name for name in picked if now[name].kind == "mask" and rng.random() < 0.4]
            if choice == "crop":  # which refuses a mask of another size than its image
                sizes = {now[name].data.shape[:2] for name in picked if name not in masks}
                masks = [name for name in masks if now[name].data.shape[:2] in sizes]
            chosen = [name for name in picked if name not in masks]
            if not chosen:
                chosen, masks = masks, []
            size = (rng.randint(5, 24), rng.randint(5, 24))
            if choice == "crop":
                size = tuple(min(n, *(now[name].data.shape[at] for name in picked)) for at, n in enumerate(size))
            options = {"fields": chosen, **({"masks": masks} if masks else {})}
            p = float(rng.randint(0, 1))

            def change(values: Any, choice: Any = choice, picked: Any = picked, size: Any = size, p: Any = p) -> Any:
                changes = {"resize": lambda v: resized(v, size), "crop": lambda v: cropped(v, size)}
                made = changes.get(choice, mirrored if p else lambda v: v)
                return {name: made(value) if name in picked else value for name, value in values.items()}

            def stage(
                pipe: Pipeline, choice: Any = choice, size: Any = size, p: Any = p, options: Any = options
            ) -> Any:
                if choice == "flip":
                    return pipe.random_flip(p, **options)
                return (pipe.resize if choice == "resize" else pipe.center_crop)(list(size), **options)

            apply(f"{choice} {size} {p} {options}", stage, change)
        elif choice == "rename":
            old = rng.choice(sorted(now))
            new = rng.choice([*names.get(now[old].kind, ["number"]), "t.png", "u"])
            if new not in now:
                rename({new: old})
        elif choice == "map":
            olds = [rng.choice(sorted(now)) for _ in range(rng.randint(2, 5))]
            news = rng.sample(["a", "b", "c.png", "d.png", "e.npy", "seg.png", "jpg", "npy"], len(olds))
            items = [(new, old, rng.choice(MOVES)) for new, old in zip(news, olds, strict=True)]
            apply(f"map {items}", *_moved(items, is_tuple=False))
        elif choice == "to_dict":
            chosen = rng.sample(sorted(now), rng.randint(1, len(now)))
            apply(
                f"to_dict {chosen}",
                lambda pipe, chosen=chosen: pipe.to_dict(*chosen, "__key__"),
                lambda values, chosen=chosen: {name: values[name] for name in chosen},
            )
    if rng.random() < 0.5:
        places = [rng.choice(sorted(now)) for _ in range(rng.randint(1, 4))]
        apply(
            f"to_tuple {places}",
            lambda pipe: pipe.to_tuple("__key__", *places),
            lambda values: {at + 1: values[name] for at, name in enumerate(places)},
        )
        if rng.random() < 0.7:
            moved = [(new + 1, rng.randint(1, len(places)), rng.choice(MOVES)) for new in range(rng.randint(1, 4))]
            apply(f"map {moved}", *_moved(moved, is_tuple=True))
    return drawn


def _moved(items: list[tuple[Any, Any, str]], *, is_tuple: bool) -> tuple[Any, Any]:
    def step(values: dict[Any, Value]) -> dict[Any, Value]:
        return {
            new: mirrored(values[old])
            if how == "mirrored" and isinstance(values[old].data, np.ndarray)
            else values[old]
            for new, old, how in items
        }

    function = Moved([(0, 0, "same"), *items] if is_tuple else items, is_tuple=is_tuple)
    return (lambda pipe: pipe.map(function)), step


def row(value: Value) -> Any:
    """Return a value as it is in a batch."""
    if value.kind not in {"image", "mask"}:
        return value.data
    return value.data[None] if value.data.ndim == 2 else value.data.transpose(2, 0, 1)


INDEX: dict[str, Any] = {"decode": {"images": "index", "only": "seg.png"}}
PARTS: dict[str, list[dict[str, Any]]] = {
    "nothing": [],
    "numbers": [INDEX],
    "flipped": [INDEX, {"random_flip": {"p": 1.0, "fields": "seg.png"}}],
}


def of_part(name: str, values: dict[str, Value]) -> dict[str, Value]:
    """Return a sample after the stages of its part."""
    if name == "nothing":
        return values
    mask = decoded(values["seg.png"], "")
    return {**values, "seg.png": mirrored(mask) if name == "flipped" else mask}


def compare(seed: int, folders: list[str]) -> int:
    """Run one pipeline and its reference; return the number of compared values.

    Raises:
        AssertionError: A value differs, or the pipeline fails.
    """
    rng = random.Random(seed)
    samples = {key: values for folder in folders for key, values in read(folder).items()}
    drawn = draw(rng, samples["p0k0"])
    pipe = Pipeline().exact(folders[0], seed=seed)
    if rng.random() < 0.5:
        names = [rng.choice(sorted(PARTS)) for _ in range(2)]
        parts = [{"shards": each, "repeat": 1, "stages": PARTS[n]} for each, n in zip(folders, names, strict=True)]
        pipe = Pipeline().exact(mixture=parts, seed=seed)
        drawn.text.insert(0, f"mixture {names}")
        samples = {key: of_part(names[key.startswith("p1")], values) for key, values in samples.items()}
    for stage in drawn.stages:
        pipe = stage(pipe)
    size = rng.choice([1, 2, 3])
    count = 0
    try:
        batches = list(pipe.batched(size).loader(workers=0))
    except WdskitError as err:
        raise AssertionError(f"{seed}: {drawn.text}: {err}") from err
    for batch in batches:
        columns = dict(enumerate(batch)) if isinstance(batch, tuple) else dict(batch)
        keys = columns[0] if isinstance(batch, tuple) else columns["__key__"]
        for at, key in enumerate(keys):
            values: dict[Any, Value] = samples[key]
            for step in drawn.steps:
                values = step(values)
            assert {*columns} - {0, "__key__", "__url__"} == {*values}, (seed, drawn.text)
            for name, value in values.items():
                found, wanted = np.asarray(columns[name][at]), np.asarray(row(value))
                assert found.shape == wanted.shape, (seed, name, found.shape, wanted.shape, drawn.text)
                assert value.kind == "number" or found.dtype == wanted.dtype, (seed, name, drawn.text)
                far = np.abs(found.astype(int) - wanted.astype(int)).max(initial=0)
                assert far <= value.near, (seed, name, far, drawn.text)
                count += 1
    return count


@pytest.mark.parametrize("start", range(0, COUNT, 20))
def test_random_pipelines_give_what_the_reference_gives(folders: list[str], start: int) -> None:
    assert sum(compare(seed, folders) for seed in range(start, start + 20)) > 100


def _blended(patch: pytest.MonkeyPatch) -> None:
    right = geometry.resize

    def resize(image: Any, size: Any, *, nearest: bool = False) -> Any:
        if nearest and isinstance(image, np.ndarray):
            return right(image.astype(np.float32), size).astype(image.dtype)
        return right(image, size, nearest=nearest)

    patch.setattr(geometry, "resize", resize)


def _by_place(patch: pytest.MonkeyPatch) -> None:
    right = base.transfer_marks

    def transfer_marks(known: Any, result: Any) -> Any:
        result = right(known, result)
        if isinstance(result, tuple):
            marks = {slot: mark for slot, _, mark in known}
            result = tuple(
                marked(item[...], marks[at]) if at in marks and isinstance(item, np.ndarray) else item
                for at, item in enumerate(result)
            )
        return result

    patch.setattr(base, "transfer_marks", transfer_marks)


def _shared(patch: pytest.MonkeyPatch) -> None:
    right, kept = build.bind_steps, []

    def bind_steps(stages: Any, context: Any) -> Any:
        kept.append(right(stages, context))
        return kept[0]

    patch.setattr(build, "bind_steps", bind_steps)


def _renamed(patch: pytest.MonkeyPatch) -> None:
    right = fields.Rename.__call__

    def rename(self: Any, sample: Any, *rest: Any) -> Any:
        made = right(self, sample, *rest)
        return {name: made[name].copy() if isinstance(made[name], np.ndarray) else made[name] for name in made}

    patch.setattr(fields.Rename, "__call__", rename)


def _flipped(patch: pytest.MonkeyPatch) -> None:
    right = geometry.flip
    patch.setattr(geometry, "flip", lambda image: image if np.asarray(image).dtype == np.int32 else right(image))


def _crossed(patch: pytest.MonkeyPatch) -> None:
    """Mutant: marks are known by the shape of a value, so that all values of that shape have the mark."""
    known: dict[Any, Any] = {}

    def of(slot: object, value: Any) -> Any:
        layout = layout_of(slot, value)
        shape = getattr(value, "shape", None)
        return layout if layout is None or shape is None else known.setdefault(shape, layout)

    patch.setattr(collate, "layout_of", of)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "masks are blended": _blended,
    "a layout belongs to its place": _by_place,
    "a layout belongs to its name": lambda patch: patch.setattr(
        collate, "layout_of", lambda slot, _: layout_of(slot, None)
    ),
    "parts share what is known of the first": _shared,
    "a rename forgets": _renamed,
    "a function forgets": lambda patch: patch.setattr(base, "transfer_marks", lambda _, result: result),
    "a mask is decoded as an image": lambda patch: patch.setattr(fields, "MASK", fields.IMAGE),
    "an array is decoded as an image": lambda patch: patch.setattr(fields, "ARRAY", fields.IMAGE),
    "masks are not flipped": _flipped,
    "what is known belongs to the shape": _crossed,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(folders: list[str], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    FAULTS[fault](monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(COUNT):
            compare(seed, folders)
