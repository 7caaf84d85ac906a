"""Boxes, masks and classes that the page shows for a sample."""

from __future__ import annotations

import json

import numpy as np
import pytest
from images import encoded, image_bytes, palette_image
from PIL import Image
from shards import png_of

from wdskit.view.describe import MAX_BOXES, MAX_CHARS, boxes_of, class_name, describe, find_images
from wdskit.view.samples import ViewedSample


def sample_of(document: object = None, **fields: bytes) -> ViewedSample:
    fields = {name.replace("_", "."): data for name, data in fields.items()}
    return ViewedSample(
        0, "s.tar", "k", fields if document is None else {**fields, "json": json.dumps(document).encode()}, ("a",)
    )


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"bbox": [1, 2, 3, 4]}, [(1, 2, 3, 4, "")]),
        ({"bbox": [[1, 2, 3, 4], [5, 6, 7, 8]], "labels": ["x", 3]}, [(1, 2, 3, 4, "x"), (5, 6, 7, 8, "3")]),
        ({"boxes": [[1, 2, 3, 4]], "labels": ["x", "y"]}, [(1, 2, 3, 4, "")]),
        ({"objects": [{"bbox": [1, 2, 3, 4], "category_id": 7}], "categories": {"7": "dog"}}, [(1, 2, 3, 4, "dog")]),
        ({"annotations": [{"bbox": [1, 2, 3, 4], "category_id": 7}]}, [(1, 2, 3, 4, "7")]),
        ({"objects": [{"bbox": [1, 2, 3, 4], "label": "x"}, {"bbox": None}, 5, {}]}, [(1, 2, 3, 4, "x")]),
        ({"bbox": [1, 2, 0, 4]}, []),
        ({"bbox": [1, 2, -3, 4]}, []),
        ({"bbox": [1, 2, 3]}, []),
        ({"bbox": [True, 2, 3, 4]}, []),
        ({"bbox": ["1", 2, 3, 4]}, []),
        ({"bbox": [10**400, 2, 3, 4]}, []),
        ({"boxes": {"a": 1}, "annotations": "x", "objects": {"bbox": 1}}, []),
        ([[1, 2, 3, 4]], []),
        ("text", []),
    ],
)  # fmt: skip
def test_boxes_are_those_that_coco_writes(document: object, expected: list[tuple[object, ...]]) -> None:
    assert [tuple(box.values()) for box in boxes_of(sample_of(document))] == expected


@pytest.mark.parametrize("data", [b"{", b'{"bbox": [NaN, 1, 2, 3]}', b'{"bbox": [1, 2, 1e999, 3]}', b"\xff"])
def test_what_is_no_number_is_no_box(data: bytes) -> None:
    assert boxes_of(sample_of(json=data)) == []


def test_the_first_boxes_of_many_are_shown() -> None:
    assert len(boxes_of(sample_of({"boxes": [[0, 0, 1, 1]] * 1000}))) == MAX_BOXES


def test_a_mask_is_a_further_image_that_stores_numbers() -> None:
    mask = png_of(np.zeros((8, 12), dtype=np.uint8))
    photo = image_bytes()
    assert find_images(sample_of(jpg=photo, seg_png=mask)) == ("jpg", ["seg.png"])
    assert find_images(sample_of(a_seg_png=mask, jpg=photo, txt=b"x")) == ("jpg", ["a.seg.png"])
    assert find_images(sample_of(png=encoded(palette_image(), "PNG"), jpg=photo)) == ("jpg", ["png"])
    assert find_images(sample_of(png=mask)) == ("png", [])  # a digit
    assert find_images(sample_of(left_jpg=photo, right_jpg=photo)) == ("left.jpg", [])
    assert find_images(sample_of(jpg=photo, png=b"no image")) == ("jpg", [])
    grey = encoded(Image.new("L", (8, 8)), "JPEG")
    assert find_images(sample_of(jpg=grey, png=mask)) == ("jpg", ["png"])
    assert find_images(sample_of(txt=b"x")) == (None, [])


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"0", "a"), (b"1", "1"), (b"-1", "-1"), (b"x\x1b", "x\\x1b"), (b"\xff", "\ufffd"), (b"", "")],
)
def test_a_class_has_its_name_or_else_its_number(data: bytes, expected: str) -> None:
    assert class_name({"cls": data}, sample_of().classes) == expected


def test_a_sample_without_a_good_image_says_why() -> None:
    assert describe(sample_of(txt=b"x"))["problem"] == "no image"
    shown = describe(sample_of(jpg=b"nothing"))
    assert (shown["image"], "known format" in shown["problem"]) == (None, True)


@pytest.mark.parametrize("depth", [100, 500, 1000])
def test_json_is_shown_however_deep_it_is(depth: int) -> None:
    data = b"[" * depth + b"1" + b"]" * depth
    (field,) = describe(sample_of(json=data))["fields"]
    assert field["text"].startswith("[")


def test_names_and_texts_that_are_no_utf_8_can_be_sent() -> None:
    fields = {"jpg": image_bytes(), "\udcff.png": png_of(np.zeros((2, 2), dtype=np.uint8)), "json": b'"\\ud800"'}
    shown = describe(ViewedSample(0, "\udcff.tar", "\udcff", fields, ()))
    assert json.dumps(shown, ensure_ascii=False).encode()
    assert (shown["masks"], shown["key"]) == (["\\udcff.png"], "\\udcff")


def test_long_and_bad_texts_are_shown_in_part() -> None:
    shown = describe(sample_of(txt=b"x" * (MAX_CHARS + 5), json=b"{", cls=b"a"))
    texts = {field["name"]: field["text"] for field in shown["fields"]}
    assert texts["txt"].endswith("x\n... and more")
    assert texts["json"].startswith("json: ")
    wide = b"[" * 300 + b"[1]," * 300_000 + b"1" + b"]" * 300  # 600 spaces before each item
    (field,) = describe(sample_of(json=wide))["fields"]
    assert len(field["text"]) <= MAX_CHARS + 20
    assert "not an integer" in texts["cls"]
