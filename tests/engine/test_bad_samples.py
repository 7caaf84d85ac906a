"""The error budget covers every error that one sample can cause: each stage and fault, in threads, processes, streams.

`make long WHAT=faults` runs the whole table in worker processes too; otherwise a part of it runs there.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from folders import ALL
from images import image_bytes
from masks import mask_of
from PIL import Image
from shards import write_indexed

from wdskit import Pipeline, SampleError
from wdskit.stages.registry import STAGES

NUM, BAD = 12, 5
LABEL = f"s{BAD}"


def npy(*shape: int, dtype: str = "float32") -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(shape, dtype))
    return file.getvalue()


GOOD = {
    "jpg": image_bytes("PNG", size=(24, 20)),
    "npy": npy(4),
    "cls": b"1",
}


def mask_bytes(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (width, height), 3).save(file, "PNG")
    return file.getvalue()


MASKED = GOOD | {"mask.png": mask_bytes(24, 20)}

FAULTS: dict[str, Callable[[], dict[str, bytes]]] = {
    "no image": lambda: {name: data for name, data in GOOD.items() if name != "jpg"},
    "no mask": lambda: dict(GOOD),
    "no label": lambda: {name: data for name, data in GOOD.items() if name != "cls"},
    "no array": lambda: {name: data for name, data in GOOD.items() if name != "npy"},
    "broken image": lambda: GOOD | {"jpg": b"\xff\xd8 no image"},
    "cut image": lambda: GOOD | {"jpg": GOOD["jpg"][:-30]},
    "broken label": lambda: GOOD | {"cls": b"many"},
    "large label": lambda: GOOD | {"cls": str(2**70).encode()},
    "broken array": lambda: GOOD | {"npy": b"\x93NUMPY no array"},
    "mask of another size": lambda: GOOD | {"mask.png": mask_bytes(10, 10)},
    "image of another size": lambda: GOOD | {"jpg": image_bytes("PNG", size=(10, 10))},
    "array of another size": lambda: GOOD | {"npy": npy(5)},
    "array of another dtype": lambda: GOOD | {"npy": npy(4, dtype="int16")},
    "array without axes": lambda: GOOD | {"npy": npy()},
    "one more field": lambda: GOOD | {"txt": b"more"},
    "a good sample": lambda: dict(GOOD),  # for functions
}


def raises(value: Any) -> Any:
    if isinstance(value, dict) and value.get("__key__") == LABEL:
        raise KeyError("function")
    return value


def forgets(value: Any) -> Any:
    return None if value["__key__"] == LABEL else value


def number(value: Any) -> int:
    return int(value)


def label_with_key(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"cls": sample["__key__"].encode()}


def number_of_key(value: bytes) -> int:
    if value == LABEL.encode():
        raise ZeroDivisionError("function")
    return 1


def refuses(samples: list[Any]) -> list[Any]:
    if any(sample["__key__"] == LABEL for sample in samples):
        raise ValueError("function")
    return samples


def misshapes(sample: dict[str, Any]) -> Any:
    """Return a value of another type for one sample."""
    return sample["npy"] if sample["__key__"] == LABEL else sample


def text_for_image(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"jpg": "text"} if sample["__key__"] == LABEL else sample


def four_axes(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"jpg": sample["jpg"][None]} if sample["__key__"] == LABEL else sample


def two_channels(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"jpg": sample["jpg"][..., :2]} if sample["__key__"] == LABEL else sample


def no_items(value: tuple[Any, ...]) -> Any:
    return value[:1] if value[0] == LABEL else value


def keyless(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if not name.startswith("__")}


def decoded(pipe: Pipeline) -> Pipeline:
    return pipe.decode("rgb8")


def batch(pipe: Pipeline) -> Pipeline:
    return pipe.to_tuple("jpg", "cls").batched(4)


IMAGE_FAULTS = ("no image", "broken image", "cut image")
ODD_VALUES = {"text": text_for_image, "four axes": four_axes, "two channels": two_channels}


def transform(name: str, *settings: Any, **options: Any) -> list[tuple[str, str, Callable[[Pipeline], Pipeline]]]:
    """Return pipelines with an image transform: fused, alone, of named fields, with masks, and after a function."""

    def add(pipe: Pipeline, **further: Any) -> Pipeline:
        return getattr(pipe, name)(*settings, **options, **further)

    rows: list[tuple[str, str, Callable[[Pipeline], Pipeline]]] = []
    for fault in IMAGE_FAULTS:
        rows.append((fault, "fused", lambda pipe: batch(add(decoded(pipe)).resize([8, 8]))))
        rows.append((fault, "alone", lambda pipe: batch(add(pipe.decode("rgb8", fuse=False)).resize([8, 8]))))
        rows.append((fault, "fields", lambda pipe: batch(add(decoded(pipe), fields=["jpg"]).resize([8, 8]))))
    for odd, function in ODD_VALUES.items():
        if (name, odd) not in {("center_crop", "two channels"), ("random_flip", "two channels")}:
            rows.append(
                (
                    "a good sample",
                    odd,
                    lambda pipe, function=function: batch(add(decoded(pipe).map(function)).resize([8, 8])),
                )
            )
    if name in ("resize", "center_crop", "random_resized_crop", "random_flip"):
        rows += [
            (
                fault,
                "masks",
                lambda pipe: (
                    add(pipe.decode("index", only="mask.png").decode("rgb8"), masks=["mask.png"])
                    .resize([8, 8], masks=["mask.png"])
                    .to_tuple("jpg", "cls")
                    .batched(4)
                ),
            )
            for fault in ("no mask", *(["mask of another size"] if name == "random_resized_crop" else []))
        ]
    return rows


# Stage: (fault, reason, pipeline). None: the stage reads no value.
TABLE: dict[str, list[tuple[str, str, Callable[[Pipeline], Pipeline]]] | None] = {
    "exact": None,
    "resampled": None,
    "sequential": None,
    "stream": None,
    "split_by_node": None,
    "split_by_worker": None,
    "shuffle": None,
    "with_epoch": None,
    "with_length": None,
    "select": None,  # for streams only: tests/stages/test_streaming.py
    "torchvision": None,  # tests/stages/test_torchvision.py
    "multi_hot": None,  # tests/stages/test_json_paths.py
    "bucketed": None,  # these two need columns: tests/order/test_buckets.py
    "resize_to_bucket": None,
    "decode": [
        *((fault, "all", lambda pipe: decoded(pipe).to_tuple("cls", "jpg").batched(4)) for fault in IMAGE_FAULTS[1:]),
        *((fault, "all", lambda pipe: pipe.decode().to_tuple("cls").batched(4)) for fault in ("broken label",)),
        ("broken array", "only", lambda pipe: pipe.decode(only="npy").to_tuple("npy").batched(4)),
    ],
    "map": [
        ("a good sample", "raises", lambda pipe: decoded(pipe).map(raises).to_tuple("cls").batched(4)),
        ("a good sample", "forgets", lambda pipe: decoded(pipe).map(forgets).to_tuple("cls").batched(4)),
        ("a good sample", "one by one", lambda pipe: decoded(pipe).map(raises).to_tuple("cls")),
    ],
    "map_dict": [
        ("no label", "missing", lambda pipe: pipe.map_dict(cls=number).to_tuple("npy").batched(4)),
        ("broken label", "raises", lambda pipe: pipe.map_dict(cls=number).to_tuple("cls").batched(4)),
        ("a good sample", "another type", lambda pipe: pipe.map(misshapes).map_dict(cls=number).to_tuple("cls")),
    ],
    "map_tuple": [
        (
            "a good sample",
            "raises",
            lambda pipe: pipe.map(label_with_key).to_tuple("cls").map_tuple(number_of_key).batched(4),
        ),
        (
            "a good sample",
            "another length",
            lambda pipe: pipe.to_tuple("__key__", "cls").map(no_items).map_tuple(None, number).batched(4),
        ),
        (
            "a good sample",
            "another type",
            lambda pipe: pipe.to_tuple("__key__", "cls").map(lambda v: 7 if v[0] == LABEL else v).map_tuple(str),
        ),
    ],
    "rename": [
        ("no label", "missing", lambda pipe: pipe.rename(label="cls").to_tuple("label").batched(4)),
        ("a good sample", "another type", lambda pipe: pipe.map(misshapes).rename(label="cls").to_tuple("label")),
    ],
    "to_tuple": [
        ("no label", "missing", lambda pipe: pipe.to_tuple("cls").batched(4)),
        ("no image", "missing", lambda pipe: decoded(pipe).to_tuple("jpg;jpeg").batched(4)),
        ("a good sample", "another type", lambda pipe: pipe.map(misshapes).to_tuple("cls").batched(4)),
    ],
    "to_dict": [
        ("no label", "missing", lambda pipe: pipe.to_dict("cls").batched(4)),
        ("a good sample", "another type", lambda pipe: pipe.map(misshapes).to_dict("cls").batched(4)),
    ],
    "resize": transform("resize", [16, 16]),
    "center_crop": transform("center_crop", 16),
    "random_resized_crop": transform("random_resized_crop", 16),
    "random_flip": transform("random_flip"),
    "normalize": [
        (fault, "", lambda pipe: batch(decoded(pipe).resize([8, 8]).normalize("imagenet"))) for fault in IMAGE_FAULTS
    ]
    + [
        ("a good sample", odd, lambda pipe, odd=odd: batch(decoded(pipe).map(ODD_VALUES[odd]).normalize("imagenet")))
        for odd in ODD_VALUES
    ],
    "to_tensor": [(fault, "", lambda pipe: batch(decoded(pipe).resize([8, 8]).to_tensor())) for fault in IMAGE_FAULTS]
    + [
        ("a good sample", odd, lambda pipe, odd=odd: batch(decoded(pipe).map(ODD_VALUES[odd]).to_tensor()))
        for odd in ("text", "four axes")
    ],
    "batched": [
        ("image of another size", "tuples", lambda pipe: batch(decoded(pipe))),
        ("image of another size", "dicts", lambda pipe: decoded(pipe).to_dict("jpg", "cls").batched(4)),
        ("array of another size", "tuples", lambda pipe: pipe.decode().to_tuple("npy").batched(4)),
        ("array of another dtype", "dicts", lambda pipe: pipe.decode().to_dict("npy", "cls").batched(4)),
        ("array of another dtype", "ragged", lambda pipe: pipe.decode().to_dict("npy").batched(4, ragged=["npy"])),
        ("array without axes", "ragged", lambda pipe: pipe.decode().to_dict("npy").batched(4, ragged=["npy"])),
        ("no array", "ragged", lambda pipe: pipe.decode().map(keyless).batched(4, ragged=["npy"])),
        ("large label", "tuples", lambda pipe: pipe.decode().to_tuple("cls").batched(4)),
        ("large label", "batches of one", lambda pipe: pipe.decode().to_tuple("cls").batched(1)),
        ("one more field", "dicts", lambda pipe: decoded(pipe).batched(4)),
        ("no label", "dicts", lambda pipe: decoded(pipe).batched(4)),
        ("a good sample", "another type", lambda pipe: pipe.decode().map(misshapes).batched(4)),
        ("a good sample", "of functions", lambda pipe: pipe.batched(4, collate=refuses)),
    ],
}

ROWS = [(stage, *row) for stage, rows in TABLE.items() for row in rows or ()]
NAMES = [" - ".join(filter(None, row[:3])) for row in ROWS]
PLANNED = {"here": {"workers": 0}, "threads": {"workers": 0, "threads": 3}}
FORKED = {"workers": 1, "threads": 2, "start_method": "fork"}
IN_PROCESSES = range(0, len(ROWS), 1 if ALL else 12)
CASES = [
    *(
        pytest.param(row, way, id=f"{NAMES[at]} - {name}")
        for name, way in PLANNED.items()
        for at, row in enumerate(ROWS)
    ),
    *(pytest.param(ROWS[at], FORKED, id=f"{NAMES[at]} - process") for at in IN_PROCESSES),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The pattern of a shard in which sample `s5` has a fault."""
    made: dict[str, str] = {}

    def make(fault: str) -> str:
        if fault not in made:
            folder = tmp_path_factory.mktemp("bad")
            good = MASKED if "mask" in fault else GOOD
            samples = {f"s{at}": FAULTS[fault]() if at == BAD else dict(good) for at in range(NUM)}
            write_indexed(folder, samples)
            made[fault] = str(folder / "s.tar")
        return made[fault]

    return make


def test_every_stage_has_a_row() -> None:
    assert TABLE.keys() == STAGES.keys()


@pytest.mark.parametrize(("row", "way"), CASES)
def test_the_budget_covers_what_one_sample_can_cause(
    folders: Callable[[str], str], tmp_path: Any, row: Any, way: dict[str, Any]
) -> None:
    _, fault, _, build = row
    pattern = folders(fault)
    pipe = build(Pipeline().sequential(pattern, tail="drop"))
    errors = {"max_bad": 1, "transforms": True, "dir": str(tmp_path)}
    loader = pipe.loader(errors=errors, **way)
    items = list(loader)
    assert len(items) == len(loader)
    [line] = (tmp_path / "bad-pipeline-rank00000.jsonl").read_text().splitlines()
    assert json.loads(line)["key"] == LABEL
    if way == PLANNED["here"]:
        with pytest.raises(SampleError, match=r"s[4-7]") as caught:
            list(pipe.loader(workers=0))
        assert caught.value.key == LABEL or caught.value.stage == "batched"
        if not caught.value.is_function:  # errors of wdskit's own stages need no further setting
            assert len(list(pipe.loader(workers=0, errors={"max_bad": 1}))) == len(loader)


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_in_a_stream_it_is_the_error_of_a_sample(folders: Callable[[str], str], row: Any) -> None:
    _, fault, _, build = row
    with pytest.raises(SampleError, match=r"s[4-7]"):
        list(build(Pipeline().stream(folders(fault))).loader(workers=0))


def test_a_pipeline_that_fits_no_sample_is_an_error_after_a_hundred(tmp_path: Any) -> None:
    write_indexed(tmp_path, {f"s{at:03d}": {"cls": b"1"} for at in range(300)})
    pipe = Pipeline().exact(str(tmp_path / "s.tar")).resize(8).to_tuple("jpg").batched(4)
    with pytest.raises(SampleError, match=r"all 100 are bad"):
        next(iter(pipe.loader(workers=0, errors={"max_bad": "50%"})))


@pytest.mark.parametrize("size", [3, 4, 5, 8, 20])
@pytest.mark.parametrize("source", ["sequential", "exact"])
def test_padded_rows_do_not_decide_which_shape_is_bad(tmp_path, size, source):
    """They are copies of the last sample, which may be the bad one."""
    for bad in range(3):
        folder = tmp_path / str(bad)
        write_indexed(folder, {f"k{at}": {"npy": npy(3 if at == bad else 2)} for at in range(3)})
        options = {"tail": "pad", "seed": 1} if source == "exact" else {}
        pipe = getattr(Pipeline(), source)(str(folder), **options).decode()
        pipe = pipe.to_tuple("__key__", "npy", *mask_of(pipe)).batched(size)
        loader = pipe.loader(workers=0, errors={"max_bad": 2})
        [[keys, arrays, valid]] = loader
        assert arrays.shape == (size, 2)
        assert sorted(key for key, one in zip(keys, valid, strict=True) if one) == sorted(
            {"k0", "k1", "k2"} - {f"k{bad}"}
        )
        assert loader.stats().replaced == 1
