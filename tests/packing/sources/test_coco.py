"""Packing COCO's annotations, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from images import make_folder
from shards import samples_in

from wdskit import PackError, RowError, pack

COCO = {
    "info": {"year": 2017},
    "images": [
        {"id": 9, "file_name": "val/0001.jpg", "width": 12},
        {"id": 4, "file_name": "val/0000.jpg", "width": 12},
    ],
    "annotations": [
        {"id": 1, "image_id": 4, "category_id": 18, "bbox": [1.5, 2, 3, 4]},
        {"id": 2, "image_id": 4, "category_id": 1, "segmentation": [[1, 2]]},
        {"id": 3, "image_id": 4, "caption": "two"},
    ],
    "categories": [{"id": 1, "name": "person"}, {"id": 18, "name": "dog"}, {"id": 90, "name": "brush"}],
}


def write(tmp_path: Path, found: object) -> Path:
    make_folder(tmp_path / "images", {"val": 2})
    path = tmp_path / "instances.json"
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    return path


def test_a_row_is_an_image_with_all_that_is_annotated_in_it(tmp_path):
    pack(write(tmp_path, COCO), tmp_path / "out", images=tmp_path / "images")
    samples = samples_in(tmp_path / "out")
    assert list(samples) == ["val/0001", "val/0000"]
    assert json.loads(samples["val/0000"]["json"]) == {
        "image": COCO["images"][1],
        "annotations": COCO["annotations"],
        "categories": {"18": "dog", "1": "person"},
    }
    assert json.loads(samples["val/0001"]["json"]) == {"image": COCO["images"][0], "annotations": [], "categories": {}}
    assert samples["val/0000"]["jpg"] == (tmp_path / "images" / "val" / "0000.jpg").read_bytes()


def test_images_are_beside_the_file_where_nothing_else_is_said_and_captions_have_no_categories(tmp_path):
    captions = {**COCO, "annotations": COCO["annotations"][2:], "categories": []}
    (tmp_path / "images").mkdir()
    path = write(tmp_path, captions).rename(tmp_path / "images" / "captions.json")
    pack(path, tmp_path / "out")
    assert [json.loads(s["json"])["categories"] for s in samples_in(tmp_path / "out").values()] == [{}, {}]


@pytest.mark.parametrize(
    ("found", "error", "problem"),
    [
        ("[1]", PackError, "it holds a list"),
        ("{", PackError, "it is not JSON"),
        ('{"images": [], "images": []}', PackError, "appears twice"),
        ("[" * 100_000, PackError, "it is not JSON"),
        ('{"images": [NaN]}', PackError, "NaN is not JSON"),
        ({"a": 1}, PackError, "it has no list of objects 'images', which COCO annotations have; it has 'a'"),
        ({**COCO, "annotations": [1]}, PackError, "no list of objects 'annotations'"),
        ({**COCO, "categories": None}, PackError, "no list of objects 'categories'"),
        ({**COCO, "images": COCO["images"] * 2}, PackError, "the id 9 is not a number, or appears twice"),
        ({**COCO, "images": [{"id": "9"}]}, PackError, "the id '9' is not a number"),
        ({**COCO, "images": COCO["images"][:1]}, PackError, "is of the image 4, which is not in `images`"),
        ({**COCO, "images": [], "annotations": []}, PackError, "nothing to pack"),
        ({**COCO, "categories": COCO["categories"][:1]}, RowError, "image 1: .* has the category 18, which is not in"),
        ({**COCO, "images": [{"id": 4}], "annotations": []}, RowError, "image 0: its column 'file_name' holds None"),
        ({**COCO, "images": [{"id": 4, "file_name": "gone.jpg"}], "annotations": []}, RowError, "image 0: .*No such"),
        ({**COCO, "images": [{"id": 4, "file_name": "../x.jpg"}], "annotations": []}, RowError, "image 0: .*No such"),
    ],
)
def test_what_is_no_coco_is_an_error(tmp_path, found, error, problem):
    path = write(tmp_path, found)
    with pytest.raises(error, match=problem):
        pack(path, tmp_path / "out", images=tmp_path / "images")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["train2017", "annotations/pictures"])
def test_images_elsewhere_are_looked_for_beside_the_annotations(tmp_path, monkeypatch, place):
    """COCO is distributed like this: annotations/instances.json next to train2017/."""
    monkeypatch.chdir(tmp_path)
    Path("annotations").mkdir()
    path = Path("annotations/instances.json")
    path.write_text(json.dumps(COCO))
    named = COCO["images"][0]["file_name"]
    with pytest.raises(RowError, match="Name the folder of the images with --images DIR, or use --skip-bad"):
        pack(path, "out")
    (Path(place) / named).parent.mkdir(parents=True)
    (Path(place) / named).write_bytes(b"x")
    with pytest.raises(RowError, match=f"Name the folder of the images with --images {place}, or"):
        pack(path, "out")


def test_a_folder_of_images_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(PackError, match="images: gone: there is no such folder"):
        pack(write(tmp_path, COCO), tmp_path / "out", images="gone")


def test_categories_and_captions_become_fields(tmp_path):
    make_folder(tmp_path / "images", {".": 3})
    found = {
        "images": [{"id": n, "file_name": f"{n:04d}.jpg", "license": n} for n in range(3)],
        "annotations": [
            {"id": 1, "image_id": 0, "category_id": 9, "caption": "a dog "},
            {"id": 2, "image_id": 0, "category_id": 9, "caption": "and a bone"},
            {"id": 3, "image_id": 1, "category_id": 4},
        ],
        "categories": [{"id": 9, "name": "dog"}, {"id": 4, "name": "cat"}],
    }
    fields = {"cls": "category", "txt": "caption", "index": "license"}
    result = pack(write(tmp_path, found), tmp_path / "out", images=tmp_path / "images", fields=fields)
    assert result.classes == {"cat": 0, "dog": 1}
    samples = samples_in(tmp_path / "out")
    assert [sample.get("cls") for sample in samples.values()] == [b"1", b"0", None]
    assert [sample.get("txt") for sample in samples.values()] == [b"a dog\nand a bone", None, None]
    assert [sample["index"] for sample in samples.values()] == [b"0", b"1", b"2"]
    found["annotations"][1]["category_id"] = 4
    with pytest.raises(RowError, match="image 0: its annotations have several categories: cat, dog"):
        pack(write(tmp_path, found), tmp_path / "other", images=tmp_path / "images", fields=fields)


@pytest.mark.parametrize("found", [{**COCO, "categories": []}, {k: v for k, v in COCO.items() if k != "categories"}])
def test_labels_need_categories(tmp_path, found):
    with pytest.raises(PackError, match=r"instances.json: it has no categories.*\n.*--field cls=category"):
        pack(write(tmp_path, found), tmp_path / "out", images=tmp_path / "images", fields={"cls": "category"})
