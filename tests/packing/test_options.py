"""Options are written once: the keywords of `pack` and `reshard`, their objects and the command line are the same."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from images import make_folder
from shards import bytes_in

import wdskit
from wdskit import PackError, PackOptions, ReshardOptions

ROWS = [{"__key__": f"{number:02d}", "txt": str(number)} for number in range(9)]


@pytest.mark.parametrize(("function", "kind"), [(wdskit.pack, PackOptions), (wdskit.reshard, ReshardOptions)])
def test_every_option_is_a_keyword_with_the_same_default_and_an_explanation(function, kind):
    keywords = {
        one.name: one.default
        for one in inspect.signature(function).parameters.values()
        if one.kind is one.KEYWORD_ONLY and one.name not in {"options", "progress", "disk"}
    }
    assert keywords == {one.name: one.default for one in dataclasses.fields(kind)}
    text = inspect.getdoc(wdskit.pack) + inspect.getdoc(function)
    assert [name for name in keywords if f"\n    {name}: " not in text] == []


def test_an_object_packs_what_the_keywords_pack(tmp_path):
    options = PackOptions(max_samples=2, shuffle=1, pattern="p-%d.tar")
    wdskit.pack(ROWS, tmp_path / "one", max_samples=2, shuffle=1, pattern="p-%d.tar")
    wdskit.pack(ROWS, tmp_path / "two", options=options)
    assert bytes_in(tmp_path / "one") == bytes_in(tmp_path / "two")


def test_an_object_and_keywords_are_not_mixed(tmp_path):
    with pytest.raises(PackError, match=r"shuffle: it excludes `options`. Use dataclasses.replace"):
        wdskit.pack(ROWS, tmp_path / "out", options=PackOptions(), shuffle=1)


def test_a_wrong_option_is_refused_where_it_is_made():
    for wrong in ({"max_bytes": "many"}, {"part": "3/3"}, {"workers": 0}, {"keys": "x"}, {"resize": 0}, {"on": "dask"}):
        with pytest.raises(PackError, match=f"^{next(iter(wrong))}"):
            PackOptions(**wrong)


def test_options_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PackOptions().workers = 2


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: PackOptions(split_name="x"), "split_name: it has no effect without export"),
        (lambda: PackOptions(max_pixels=9, validate="magic"), "max_pixels: it has no effect with validate magic"),
        (lambda: PackOptions(max_pixels=9, validate="none"), "max_pixels: it has no effect with validate none"),
        (lambda: ReshardOptions(max_pixels=9), "max_pixels: it has no effect with validate none"),
        (lambda: ReshardOptions(split_name="x"), "split_name: it has no effect without export"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(make, problem):
    with pytest.raises(PackError, match=problem):
        make()
    assert PackOptions(max_pixels=9, validate="magic", resize=3).max_pixels == 9
    assert ReshardOptions(max_pixels=9, derive="width").max_pixels == 9


def test_options_of_rows_without_an_image_belong_to_tables(tmp_path):
    make_folder(tmp_path / "photos", {"cat": 1})
    with pytest.raises(PackError, match=r"allow_no_image is for a table of text or .*, but this is an image folder"):
        wdskit.pack(tmp_path / "photos", tmp_path / "out", allow_no_image=True)


def test_an_addition_that_would_not_compare_the_images_of_the_folder_is_refused():
    with pytest.raises(PackError, match="`append` and `duplicates` cannot be combined"):
        PackOptions(append=True, duplicates="drop")
