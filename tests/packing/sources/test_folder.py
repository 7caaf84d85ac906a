"""An image folder: its rows are those of a model of the files, and layouts that are no classes are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from formats import jpeg, make_photos, png, read_folder, write_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wdskit import PackError, RowError, pack
from wdskit.packing.row import File, Label, Reading, Row
from wdskit.packing.sources import find_source

pytestmark = pytest.mark.usefixtures("hasty_disk")

KEEP = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
QUICK: dict[str, Any] = {"workers": 1}


def rows_of(path: Path, **how: Any) -> list[Row]:
    found = [*find_source(path, Reading(**how)).rows()]
    assert all(isinstance(row, Row) for row in found), found
    return found  # type: ignore[return-value]


STEMS = st.lists(st.text("ab-é0", min_size=1, max_size=3), min_size=1, max_size=6, unique=True)
TREES = st.dictionaries(st.sampled_from(["cat", "dog", "Zoo", "é", "cat/deep", "a-b"]), STEMS, min_size=1, max_size=5)


@KEEP
@given(TREES, st.sets(st.sampled_from(["txt", "seg.png"]), max_size=2), st.integers(0, 3))
def test_rows_are_the_main_files_in_the_order_of_their_paths(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, list[str]], sidecars: set[str], with_sides: int
) -> None:
    """With their sidecars, class and path; hidden names are no files."""
    tree = {name: stems for name, stems in tree.items() if name != "cat/deep" or "cat" in tree}
    tree = tree or {"cat": ["a"]}
    folder = tmp_path_factory.mktemp("tree") / "in"
    model: dict[str, tuple[str, set[str]]] = {}
    for name, stems in tree.items():
        for at, stem in enumerate(stems):
            sides = {side for side in sidecars if at % (with_sides + 1) == 0}
            write_files(folder / name, {f"{stem}.{side}": b"x" for side in sides} | {f"{stem}.jpg": jpeg(at)})
            model[f"{name}/{stem}.jpg"] = (name.split("/")[0], sides)
    write_files(folder, {".hidden/x.jpg": jpeg(0), "cat/.x.jpg" if "cat" in tree else ".y.jpg": jpeg(0)})
    used = tuple(sorted(set().union(*(sides for _, sides in model.values()))))
    found = rows_of(folder, sidecars=used, keys="given")
    paths = sorted(model, key=os.fsencode)
    assert [row.key for row in found] == [path.removesuffix(".jpg") for path in paths]
    for row, path in zip(found, paths, strict=True):
        kind, sides = model[path]
        assert {*row.fields} == {"jpg", "json", "cls", *sides}
        assert row.fields["cls"] == Label(kind)
        assert json.loads(bytes(row.fields["json"]).replace(b"\0", b"0")) == {"cls": 0, "class": kind, "path": path}  # type: ignore[arg-type]
        image = row.fields["jpg"]
        assert isinstance(image, File)
        assert image.path == str(folder / path)


def test_a_flat_folder_has_no_classes_and_a_mixture_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path / "in", {"b.jpg": jpeg(1), "a.PNG": png(1), "notes.txt": "x"})
    assert [(row.key, *row.fields) for row in rows_of(tmp_path / "in")] == [("a", "json", "png"), ("b", "jpg", "json")]
    make_photos(tmp_path / "in", {"cat": 1})
    with pytest.raises(PackError, match=r"in/(a\.PNG|b\.jpg):"):
        pack(tmp_path / "in", tmp_path / "d", **QUICK)


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (["images/a.jpg", "masks/a.png"], {}, "images"),
        (["JPEGImages/a.jpg", "x/b.jpg"], {}, "JPEGImages"),
        (["a.wav"], {}, "in: .*no image"),
        (["a.jpg"], {"sidecars": "json"}, r"sidecars: .*json"),
        (["a.jpg"], {"sidecars": "seg/png"}, "sidecars: .*seg/png"),
        (["a.jpg"], {"files": "A B"}, "A B"),
        (["a.jpg"], {"files": "wav"}, r"\.wav"),
    ],
)
def test_a_layout_that_is_no_image_folder_is_an_error_that_names_it(
    tmp_path: Path, files: list[str], options: Any, message: str
) -> None:
    write_files(tmp_path / "in", {name: jpeg(number) for number, name in enumerate(files)})
    with pytest.raises(PackError, match=f"(?s){message}"):
        pack(tmp_path / "in", tmp_path / "d", validate="none", **QUICK, **options)


@pytest.mark.parametrize("names", [["trainer", "valley"], ["pretraining", "cat"], ["train", "tractor"], ["test", "x"]])
def test_classes_that_only_sound_like_splits_are_classes(tmp_path: Path, names: list[str]) -> None:
    make_photos(tmp_path / "in", dict.fromkeys(names, 1))
    assert len(rows_of(tmp_path / "in")) == 2


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    make_photos(tmp_path / "real", {"cat": 2})
    make_photos(tmp_path / "in", {"dog": 1})
    (tmp_path / "in" / "cat").symlink_to(tmp_path / "real" / "cat")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    (tmp_path / "real" / "cat" / "up").symlink_to(tmp_path / "in")
    assert [row.key for row in rows_of(tmp_path / "in")] == ["cat/0000", "cat/0001", "dog/0000"]
    (tmp_path / "in" / "cat" / "9.jpg").symlink_to(tmp_path / "nothing")
    with pytest.raises(RowError, match=r"cat/9\.jpg"):
        pack(tmp_path / "in", tmp_path / "d", **QUICK)


def test_a_pipe_named_as_an_image_is_no_file(tmp_path: Path) -> None:
    make_photos(tmp_path / "in", {"cat": 1})
    os.mkfifo(tmp_path / "in" / "cat" / "pipe.jpg")
    with pytest.raises(RowError, match=r"pipe\.jpg"):
        pack(tmp_path / "in", tmp_path / "d", **QUICK)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ('{"path": "other.jpg"}', "'path': 'other.jpg'"),
        ('{"class": "dog"}', "'dog'"),
        ('{"cls": 3}', "cls"),
        ("[1]", r"a\.jpg: its json is a list"),
        ('{"a": 1, "a": 2}', r"a\.json.*'a'"),
    ],
)
def test_a_json_sidecar_that_contradicts_the_folder_is_an_error(tmp_path: Path, own: str, message: str) -> None:
    write_files(tmp_path / "in" / "cat", {"a.jpg": jpeg(0), "a.json": own})
    with pytest.raises(RowError, match=message):
        pack(tmp_path / "in", tmp_path / "d", sidecars="json", **QUICK)


def test_main_files_of_another_extension_have_sidecars_of_the_longest_name(tmp_path: Path) -> None:
    """With the sidecars png and seg.png, `a.seg.png` belongs to `a`."""
    write_files(tmp_path / "in", {"a.wav": "w", "a.seg.png": png(1), "a.png": png(2), "a.b.wav": "v"})
    pack(tmp_path / "in", tmp_path / "d", files="wav", sidecars="png,seg.png", **QUICK)
    found = read_folder(tmp_path / "d")
    assert found["a"].keys() == {"wav", "seg.png", "png", "json"}
    assert found["a_b"].keys() == {"wav", "json"}
