"""COCO annotations: a row for each image with all its annotations, and errors that name the bad image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from formats import jpeg, read_classes, read_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wdskit import PackError, RowError, pack

pytestmark = pytest.mark.usefixtures("hasty_disk")

KEEP = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
QUICK: dict[str, Any] = {"workers": 1}
IDS = st.integers(0, 9) | st.sampled_from("abc")


def write(folder: Path, document: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(5):
        (folder / f"{number}.jpg").write_bytes(jpeg(number))
    (folder / "c.json").write_text(document if isinstance(document, str) else json.dumps(document))
    return folder / "c.json"


@KEEP
@given(
    st.lists(IDS, min_size=1, max_size=5, unique=True),
    st.lists(IDS, min_size=1, max_size=4, unique=True),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.floats(0, 99)), max_size=9),
)
def test_a_row_has_its_image_all_its_annotations_and_the_names_of_their_categories(
    tmp_path_factory: pytest.TempPathFactory, ids: list[Any], kinds: list[Any], marks: list[tuple[int, int, float]]
) -> None:
    """Ids are numbers or texts."""
    folder = tmp_path_factory.mktemp("coco")
    images = [{"id": number, "file_name": f"{at}.jpg", "width": 12} for at, number in enumerate(ids)]
    categories = [{"id": number, "name": f"name {number!r}"} for number in kinds]
    annotations = [
        {"id": at, "image_id": ids[image % len(ids)], "category_id": kinds[kind % len(kinds)], "area": area}
        for at, (image, kind, area) in enumerate(marks)
    ]
    source = write(folder, {"images": images, "annotations": annotations, "categories": categories})
    pack(source, folder / "d", **QUICK)
    found = read_folder(folder / "d")
    assert [*found] == [f"{at}" for at in range(len(ids))]
    for image, fields in zip(images, found.values(), strict=True):
        own = [one for one in annotations if one["image_id"] == image["id"]]
        assert json.loads(fields["json"]) == {
            "image": image,
            "annotations": own,
            "categories": {str(one["category_id"]): f"name {one['category_id']!r}" for one in own},
        }


def test_category_and_captions_become_fields(tmp_path: Path) -> None:
    """`cls` is numbered over all categories of the file, also of those without an image."""
    document = {
        "images": [{"id": n, "file_name": f"{n}.jpg"} for n in range(3)],
        "annotations": [
            {"image_id": 0, "category_id": 5, "caption": " a dog "},
            {"image_id": 0, "category_id": 5, "caption": "second"},
            {"image_id": 1, "category_id": 7},
        ],
        "categories": [{"id": 5, "name": "dog"}, {"id": 7, "name": "cat"}, {"id": 9, "name": "bird"}],
    }
    source = write(tmp_path, document)
    pack(source, tmp_path / "d", fields={"cls": "category", "txt": "caption"}, **QUICK)
    found = read_folder(tmp_path / "d")
    assert read_classes(tmp_path / "d") == {"bird": 0, "cat": 1, "dog": 2}
    assert [fields.get("cls") for fields in found.values()] == [b"2", b"1", None]
    assert [fields.get("txt") for fields in found.values()] == [b"a dog\nsecond", None, None]
    document["annotations"].append({"image_id": 1, "category_id": 9})  # type: ignore[arg-type]
    with pytest.raises(RowError, match=r"image 1: .*(cat.*bird|bird.*cat)"):
        pack(write(tmp_path, document), tmp_path / "e", fields={"cls": "category"}, **QUICK)


ONE = {"id": 1, "file_name": "0.jpg"}


@pytest.mark.parametrize(
    ("document", "error", "message"),
    [
        ("{", PackError, r"c\.json: .*JSON"),
        ({"a": 1}, PackError, r"c\.json: .*images"),
        ({"images": 3}, PackError, r"c\.json: .*images"),
        ({"images": [ONE], "categories": [{"id": 1}, {"id": 1}]}, PackError, r"c\.json: .*categor"),
        ({"images": [{"file_name": "0.jpg"}]}, RowError, "image 0: .*id"),
        ({"images": [ONE, ONE]}, RowError, "image 1: .*id 1"),
        ({"images": [3]}, RowError, "image 0: .*id"),
        ({"images": [{"id": 1, "file_name": "\0.jpg"}]}, RowError, "image 0: "),
        ({"images": [{"id": 1, "file_name": "0.txt"}]}, RowError, r"image 0: .*'0\.txt'"),
        (
            {"images": [ONE], "annotations": [{"image_id": 1, "category_id": 9}], "categories": [{"id": 1}]},
            RowError,
            "image 0: .*9",
        ),
    ],
)
def test_annotations_that_cannot_be_packed_are_an_error_with_its_image(
    tmp_path: Path, document: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pack(write(tmp_path, document), tmp_path / "d", **QUICK)
