"""Random pipelines are compared with PIL and numpy, value by value; the reference knows a field by its name alone.

A pipeline decodes, moves, makes, drops, changes and batches values in any order, in images of any size, with any number
of classes and channels and beside any other fields. `WDSKIT_ALL` runs 3,000 of them.
"""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import ALL
from images import encoded, photo
from PIL import Image
from shards import write_indexed

from wdskit import Pipeline, WdskitError
from wdskit.codecs.fields import encode_field
from wdskit.stages import base, collate, run
from wdskit.stages.images import geometry

COUNT = 3000 if ALL else 80
SIZES = [(20, 26), (3, 4), (1, 3), (8, 8)]
NAMES = ["a", "b", "c.png", "left.jpg", "x.npy", "jpg", "seg.png", "heat"]


@dataclass
class State:
    """A sample in the reference.

    Attributes:
        values: The value of each field.
        images: The names of images that are not the name of an image.
        masks: The names of masks.
        colours: The names of decoded or blended images, which no stage takes as a mask.
        near: Levels by which PIL and torch may differ, from resizing.
    """

    values: dict[Any, Any]
    images: set[str] = field(default_factory=set)
    masks: set[str] = field(default_factory=set)
    colours: set[str] = field(default_factory=set)
    near: dict[Any, int] = field(default_factory=dict)

    def is_image(self, name: str) -> bool:
        return name in self.images or name.endswith(("jpg", "png"))

    def moved(self, names: dict[str, str], *, keep: bool) -> None:
        """Give values new names, which also tell what the fields are."""
        kept = {name: value for name, value in self.values.items() if keep and name not in names.values()}
        images = {new for new, old in names.items() if self.is_image(old)}
        self.values = kept | {new: self.values[old] for new, old in names.items()}
        self.images = (self.images - names.keys()) | images
        for known in (self.masks, self.colours):
            found = {new for new, old in names.items() if old in known}
            known.difference_update(names)
            known.update(found)
        self.near |= {new: self.near.get(old, 0) for new, old in names.items()}


Step = tuple[str, Callable[[Pipeline], Pipeline], Callable[[State], None]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """For each size, two folders of three samples: a mask, a photograph, an array that looks like one, a number."""
    found = []
    for size in SIZES:
        made = []
        for part in range(2):
            path = tmp_path_factory.mktemp("random")
            rng = np.random.default_rng(part)
            samples = {}
            for number in range(3):
                ids = rng.integers(0, 2, size, dtype=np.uint8) * np.uint8(200 if number else 0)
                samples[f"p{part}k{number}"] = {
                    "jpg": encoded(photo(*size) + np.uint8(7 * number + part), "PNG"),  # a PNG, which is lossless
                    "seg.png": encoded(ids, "PNG"),
                    "npy": encode_field("npy", rng.integers(0, 256, (*size, 3), dtype=np.uint8)),
                    "cls": b"%d" % (10 * part + number),
                }
            write_indexed(path, samples)
            made.append(str(path))
        found.append(made)
    return found


def read(folder: str) -> dict[str, dict[str, bytes]]:
    """Return the samples of a folder, read by tarfile."""
    found: dict[str, dict[str, bytes]] = {}
    with tarfile.open(Path(folder) / "s.tar") as tar:
        for member in tar:
            key, _, name = member.name.partition(".")
            file = tar.extractfile(member)
            assert file is not None
            found.setdefault(key, {})[name] = file.read()
    return found


def decode(state: State, spec: str, only: str = "") -> None:
    for name, value in state.values.items():
        if not isinstance(value, bytes) or only not in ("", name):
            continue
        if value.isdigit():
            state.values[name] = int(value)
        elif value.startswith(b"\x93NUMPY"):
            state.values[name] = np.load(io.BytesIO(value))
        elif state.is_image(name):
            image = Image.open(io.BytesIO(value))
            mode = "L" if spec == "l8" else "RGB"
            state.values[name] = np.array(image).astype(np.int32) if only else np.array(image.convert(mode))
            (state.masks if only else state.colours).add(name)


def resized(array: Any, size: tuple[int, int], *, nearest: bool) -> Any:
    if array.shape[:2] == size:
        return array
    if nearest:
        rows, columns = ((2 * np.arange(n) + 1) * old // (2 * n) for n, old in zip(size, array.shape, strict=False))
        return array[rows][:, columns]
    return np.array(Image.fromarray(array).resize(size[::-1], Image.Resampling.BILINEAR))


def cropped(array: Any, size: tuple[int, int]) -> Any:
    top, left = (round((old - new) / 2) for old, new in zip(array.shape, size, strict=False))
    return array[top : top + size[0], left : left + size[1]]


def grey(array: Any) -> Any:
    return array.reshape(*array.shape[:2], -1)[..., 0]


MAKES: dict[str, Callable[[Any], Any]] = {
    "same": lambda array: array,
    "copied": lambda array: array.copy(),
    "mirrored": lambda array: array[:, ::-1],
    "half": lambda array: array // 2,
    "zeros": lambda array: np.zeros(array.shape[:2], np.int32),
    "float": lambda array: array.astype(np.float32),
    **{
        f"one-hot {n}": lambda array, n=n: np.eye(n, dtype=np.float32)[grey(array).astype(int) % n]
        for n in (2, 3, 4, 5)
    },
}
LATE = {"tensor": lambda array: torch.from_numpy((array if array.ndim == 2 else array.transpose(2, 0, 1)).copy())}


@dataclass
class Made:
    """A user's function that makes each new value of an old one, as (new, old, how)."""

    items: list[tuple[Any, Any, str]]
    is_tuple: bool = False

    def values(self, sample: Any) -> list[tuple[Any, Any]]:
        return [(new, self.one(sample[old], how)) for new, old, how in self.items]

    @staticmethod
    def one(value: Any, how: str) -> Any:
        return {**MAKES, **LATE}[how](value) if isinstance(value, np.ndarray) else value

    def __call__(self, sample: Any) -> Any:
        made = self.values(sample)
        if self.is_tuple:
            return (sample[0], *(value for _, value in made))
        return {"__key__": sample["__key__"], **dict(made)}

    def step(self, state: State) -> None:
        near = {new: state.near.get(old, 0) for new, old, _ in self.items}
        state.values, state.near, state.colours = dict(self.values(state.values)), near, set()


def draw(rng: random.Random, state: State) -> list[Step]:
    """Return a random pipeline for samples like `state`, and what each stage does."""
    steps: list[Step] = []

    def add(text: str, stage: Callable[[Pipeline], Pipeline], step: Callable[[State], None]) -> None:
        steps.append((text, stage, step))
        step(state)

    def rename(names: dict[str, str]) -> None:
        add(f"rename {names}", lambda pipe: pipe.rename(**names), lambda now: now.moved(names, keep=True))

    spec, mask = rng.choice(["rgb8", "l8"]), "seg.png"
    if rng.random() < 0.5:
        mask = rng.choice(["m.png", "label.png"])
        rename({mask: "seg.png"})
    add("index", lambda pipe: pipe.decode("index", only=mask), lambda now: decode(now, "index", mask))
    add(spec, lambda pipe: pipe.decode(spec), lambda now: decode(now, spec))
    for _ in range(rng.randint(1, 6)):
        arrays = [name for name, value in state.values.items() if isinstance(value, np.ndarray)]
        choice = rng.choice(["change", "change", "rename", "map", "map", "to_dict"])
        if choice == "change" and arrays:
            add(*_change(rng, state, arrays))
        elif choice == "rename":
            old, new = rng.choice(sorted(state.values)), rng.choice([*NAMES, "t.png", "u"])
            if new not in state.values:
                rename({new: old})
        elif choice == "map":
            made = Made([(new, rng.choice(sorted(state.values)), rng.choice([*MAKES]))
                         for new in rng.sample(NAMES, rng.randint(2, 5))])  # fmt: skip
            add(f"map {made.items}", lambda pipe, made=made: pipe.map(made), made.step)
        elif choice == "to_dict":
            names = rng.sample(sorted(state.values), rng.randint(1, len(state.values)))
            add(
                f"to_dict {names}",
                lambda pipe, names=names: pipe.to_dict(*names, "__key__"),
                lambda now, names=names: now.moved({name: name for name in names}, keep=False),
            )
    if rng.random() < 0.5:
        places = [rng.choice(sorted(state.values)) for _ in range(rng.randint(1, 4))]
        items = [(place, name, rng.choice(["same", "half", *LATE])) for place, name in enumerate(places, start=1)]

        def to_places(now: State) -> None:
            now.near |= {place: now.near.get(name, 0) for place, name, _ in items}
            now.images = {place for place, name, _ in items if now.is_image(name)}  # type: ignore[misc]
            now.values = {place: Made.one(now.values[name], how) for place, name, how in items}
            now.is_image = now.images.__contains__  # type: ignore[method-assign, assignment]

        by_place = Made([(place, place, how) for place, _, how in items], is_tuple=True)
        add(f"to_tuple {items}", lambda pipe: pipe.to_tuple("__key__", *places).map(by_place), to_places)
    return steps


def _change(rng: random.Random, state: State, arrays: list[str]) -> Step:
    """Return a stage that changes some of the fields `arrays`, and some of these as masks."""
    choice = rng.choice(["resize", "crop", "flip"])
    picked = rng.sample(arrays, rng.randint(1, min(3, len(arrays))))
    masks = {name for name in picked if name not in state.colours and rng.random() < 0.4}
    size = (rng.randint(1, 24), rng.randint(1, 24))
    fields = sorted(name for name in picked if name not in masks and _may_change(state, name, choice))
    if choice == "crop":  # which refuses a mask of another size than its image
        size = tuple(min(n, *(state.values[name].shape[at] for name in picked)) for at, n in enumerate(size))
        sizes = {state.values[name].shape[:2] for name in fields or masks}
        masks = {name for name in masks if state.values[name].shape[:2] in sizes}
    if not fields:
        fields, masks = sorted(name for name in masks if _may_change(state, name, choice)), set()
    if not fields:
        return "nothing", lambda pipe: pipe, lambda _: None
    options = {"fields": fields, **({"masks": sorted(masks)} if masks else {})}
    p = float(rng.randint(0, 1))

    def stage(pipe: Pipeline) -> Pipeline:
        if choice == "flip":
            return pipe.random_flip(p, **options)
        return (pipe.resize if choice == "resize" else pipe.center_crop)(list(size), **options)

    def step(now: State) -> None:
        for name in (*fields, *masks):
            is_mask = name in masks or name in now.masks
            value = now.values[name]
            if choice == "resize":
                now.values[name] = resized(value, size, nearest=is_mask)
                now.near[name] = now.near.get(name, 0) + (not is_mask)
            else:
                now.values[name] = cropped(value, size) if choice == "crop" else value[:, ::-1] if p else value
            now.images.add(name)
            if is_mask:
                now.masks.add(name)
            elif choice == "resize":
                now.colours.add(name)

    return f"{choice} {size} {p} {options}", stage, step


def _may_change(state: State, name: str, choice: str) -> bool:
    """Return whether a stage takes a field in `fields`, and PIL can blend its numbers if the stage does."""
    array = state.values[name]
    if name in state.masks or choice != "resize":
        return name in state.masks or array.dtype in (np.uint8, np.float32)
    return array.dtype == np.uint8 and (array.ndim == 2 or array.shape[2] in {3, 4})


def row(state: State, name: Any) -> Any:
    """Return a value as it is in a batch."""
    value = state.values[name]
    if not state.is_image(name) or not isinstance(value, np.ndarray):
        return value[None] if state.is_image(name) and isinstance(value, torch.Tensor) and value.ndim == 2 else value
    return value[None] if value.ndim == 2 else value.transpose(2, 0, 1)


INDEX: dict[str, Any] = {"decode": {"images": "index", "only": "seg.png"}}
PARTS: dict[str, list[dict[str, Any]]] = {
    "nothing": [],
    "numbers": [INDEX],
    "flipped": [INDEX, {"random_flip": {"p": 1.0, "fields": "seg.png"}}],
}


def after_part(name: str, state: State) -> None:
    """Apply the stages of a part of a mixture."""
    if name != "nothing":
        decode(state, "", "seg.png")
    if name == "flipped":
        state.values["seg.png"] = state.values["seg.png"][:, ::-1]


def compare(seed: int, folders: list[list[str]]) -> int:
    """Run one pipeline and its reference; return the number of compared values.

    Raises:
        AssertionError: A value differs, or the pipeline fails.
    """
    rng = random.Random(seed)
    pair = rng.choice(folders)
    samples = {key: State(dict(values)) for folder in pair for key, values in read(folder).items()}
    pipe, parts = Pipeline().exact(pair[0], seed=seed), ["nothing", "nothing"]
    if rng.random() < 0.2:
        pipe = Pipeline().stream(pair[0], seed=seed)
    elif rng.random() < 0.5:
        parts = [rng.choice(sorted(PARTS)) for _ in range(2)]
        mixture = [{"shards": each, "repeat": 1, "stages": PARTS[n]} for each, n in zip(pair, parts, strict=True)]
        pipe = Pipeline().exact(mixture=mixture, seed=seed)
    steps = draw(rng, State(dict(samples["p0k1"].values)))
    text = f"{seed}: {pair} {parts} {[each for each, _, _ in steps]}"
    for _, stage, _ in steps:
        pipe = stage(pipe)
    try:
        batches = list(pipe.batched(rng.choice([1, 2, 3])).loader(workers=0))
    except WdskitError as err:
        raise AssertionError(f"{text}: {err}") from err
    count = 0
    for batch in batches:
        columns = dict(enumerate(batch)) if isinstance(batch, tuple) else dict(batch)
        for at, key in enumerate(columns[0] if isinstance(batch, tuple) else columns["__key__"]):
            state = State(dict(samples[key].values))
            after_part(parts[key.startswith("p1")], state)
            for _, _, step in steps:
                step(state)
            assert {*columns} - {0, "__key__", "__url__"} == {*state.values}, text
            for name in state.values:
                found, wanted = np.asarray(columns[name][at]), np.asarray(row(state, name))
                assert found.shape == wanted.shape, (name, found.shape, wanted.shape, text)
                assert found.dtype == wanted.dtype, (name, found.dtype, wanted.dtype, text)
                far = np.abs(found.astype(float) - wanted.astype(float)).max(initial=0)
                assert far <= state.near.get(name, 0), (name, far, text)
                count += 1
    return count


@pytest.mark.parametrize("start", range(0, COUNT, 20))
def test_random_pipelines_give_what_the_reference_gives(folders: list[list[str]], start: int) -> None:
    assert sum(compare(seed, folders) for seed in range(start, start + 20)) > 100


def _blended(right: Any) -> Any:
    def resize(image: Any, size: Any, *, nearest: bool = False) -> Any:
        return right(image.astype(np.float32), size).astype(image.dtype) if nearest else right(image, size)

    return resize


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "masks are blended": (geometry, "resize", _blended),
    "masks are not flipped": (
        geometry, "flip", lambda right: lambda image: image if image.dtype == np.int32 else right(image)
    ),
    "a layout depends on the number of channels": (
        collate, "_channels_first",
        lambda right: lambda image: image if image.ndim == 3 and image.shape[2] not in {1, 3, 4} else right(image),
    ),
    "a layout depends on the size": (
        collate, "_channels_first", lambda right: lambda image: image if image.shape[0] == 3 else right(image)
    ),
    "a rename forgets": (base.Roles, "renamed", lambda _: lambda self, _: self),
    "a function forgets": (base.Roles, "after_function", lambda _: lambda *_: base.NO_ROLES),
    "an image stage forgets": (base.Roles, "named", lambda _: lambda self, *_: self),
    "a place has no name": (
        base.Roles, "names_at", lambda right: lambda self, slot: "" if isinstance(slot, int) else right(self, slot)
    ),
    "a mask is decoded as an image": (
        base.Roles, "decoded", lambda right: lambda self, only, _: right(self, only, "colours")
    ),
    "only a name tells an image": (base.Roles, "is_image", lambda _: lambda _, names: run.names_image(names)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(folders: list[list[str]], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    owner, name, make = FAULTS[fault]
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))
    with pytest.raises(AssertionError):
        for seed in range(COUNT):
            compare(seed, folders)
