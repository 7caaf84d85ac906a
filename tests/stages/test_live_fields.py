"""Only the fields that a later stage or the output uses are decoded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from images import encoded, photo
from shards import write_indexed

from wdskit import Pipeline, SampleError
from wdskit.stages import fields as stage_fields

FIELDS = {
    "jpg": encoded(photo(), "JPEG"),
    "seg.png": encoded(photo()[..., 0], "PNG"),
    "json": b'{"a": {"b": 1}, "labels": [1]}',
    "meta.json": b'{"json": {"n": 2}}',
    "cls": b"3",
    "txt": b"text",
}
ALL = {*FIELDS}


def keep(value: Any) -> Any:
    return value


PIPELINES: dict[str, tuple[Any, set[str]]] = {
    "all": (lambda pipe: pipe, ALL),
    "to_tuple": (lambda pipe: pipe.to_tuple("cls", "__key__"), {"cls"}),
    "to_dict": (lambda pipe: pipe.to_dict("txt", "__key__"), {"txt"}),
    "alternatives": (lambda pipe: pipe.to_tuple("nope;cls"), {"cls"}),
    "a path": (lambda pipe: pipe.to_tuple("json.a.b"), {"json"}),
    "a longer path": (lambda pipe: pipe.to_tuple("meta.json.json.n"), {"meta.json"}),
    "rename": (lambda pipe: pipe.rename(label="cls", a="json.a.b").to_tuple("label"), {"cls", "json"}),
    "a new name": (lambda pipe: pipe.to_dict("cls", "txt").rename(x="txt").to_tuple("x", "cls"), {"cls", "txt"}),
    "map": (lambda pipe: pipe.map(keep).to_tuple("cls"), ALL),
    "map at the end": (lambda pipe: pipe.to_tuple("cls").map(keep), {"cls"}),
    "map_dict": (lambda pipe: pipe.map_dict(txt=keep).to_tuple("cls"), {"cls", "txt"}),
    "map_tuple": (lambda pipe: pipe.to_tuple("cls").map_tuple(keep), {"cls"}),
    "multi_hot": (lambda pipe: pipe.multi_hot(source="json.labels", classes=2, to="m").to_tuple("m"), {"json"}),
    "an image": (lambda pipe: pipe.resize(8, fields="jpg").to_tuple("jpg", "cls"), {"jpg", "cls"}),
    "a mask": (
        lambda pipe: pipe.random_flip(fields="jpg", masks="nope;seg.png").to_tuple("jpg"), {"jpg", "seg.png"}
    ),
    "an image that no one uses": (lambda pipe: pipe.random_flip(fields="jpg").to_tuple("cls"), {"jpg", "cls"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("live")
    return write_indexed(path, {f"k{n}": FIELDS for n in range(3)})


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the number of decodes of each field."""
    found: Counter[str] = Counter()
    decode_field, decode_one = stage_fields.decode_field, stage_fields.FieldDecoder.decode_one

    def count(field: str, data: Any) -> object:
        found[field] += 1
        return decode_field(field, data)

    def count_image(self: Any, field: str, value: Any) -> Any:
        result = decode_one(self, field, value)
        found[field] += field.endswith(("jpg", "png")) and result is not value
        return result

    monkeypatch.setattr(stage_fields, "decode_field", count)
    monkeypatch.setattr(stage_fields.FieldDecoder, "decode_one", count_image)
    return found


@pytest.mark.parametrize("source", ["sequential", "stream"])
@pytest.mark.parametrize("name", PIPELINES)
def test_only_fields_that_are_used_are_decoded(folder: str, decoded: Counter[str], source: str, name: str) -> None:
    add, used = PIPELINES[name]
    options = {"tail": "drop"} if source == "sequential" else {}
    base = getattr(Pipeline(), source)(folder, **options).decode("index", only="seg.png").decode("rgb8", fuse=False)
    assert len(list(add(base).loader(workers=0))) == 3
    assert +decoded == dict.fromkeys(used, 3)


def test_a_part_of_a_mixture_decodes_what_the_stages_of_all_use(folder: str, decoded: Counter[str]) -> None:
    parts = [{"shards": folder, "repeat": 1, "stages": [{"decode": {"only": "cls json"}}]}]
    assert len(list(Pipeline().exact(mixture=parts).to_tuple("cls", "txt").loader(workers=0))) == 3
    assert +decoded == {"cls": 3}


def test_a_function_of_a_stream_that_chooses_samples_keeps_all_fields(folder: str, decoded: Counter[str]) -> None:
    pipe = Pipeline().stream(folder).decode(only=["cls", "txt"]).select(lambda sample: sample["txt"] == "text")
    assert len(list(pipe.shuffle(2).to_tuple("cls").loader(workers=0))) == 3
    assert +decoded == {"cls": 3, "txt": 3}


@pytest.mark.parametrize("stages", [{}, {"fuse": False}, {"only": ["jpg", "json", "cls"]}], ids=str)
def test_a_damaged_field_that_no_one_uses_is_no_error(tmp_path: Path, stages: Any) -> None:
    write_indexed(tmp_path, {"k": {**FIELDS, "json": b"{", "seg.png": b"damaged", "txt": b"\xff"}})
    base = Pipeline().exact(str(tmp_path)).decode("rgb8", **stages).random_resized_crop(8, fields="jpg")
    [(image, label)] = base.to_tuple("jpg", "cls").loader(workers=0)
    assert (image.shape, label) == ((8, 8, 3), 3)
    with pytest.raises(SampleError, match="decode failed: json"):
        list(base.to_tuple("jpg", "json").loader(workers=0))
