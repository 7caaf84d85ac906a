"""Options are declared once: the keywords of `pack`, `reshard` and `select` and the command line are the same."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from images import make_folder

import wdskit
from wdskit import PackError
from wdskit.packing.options import GROUPS, PackOptions, ReshardOptions, SelectOptions, declared_options

ROWS = [{"__key__": f"{number:02d}", "txt": str(number)} for number in range(9)]


FUNCTIONS = [(wdskit.pack, PackOptions), (wdskit.reshard, ReshardOptions), (wdskit.select, SelectOptions)]


@pytest.mark.parametrize(("function", "kind"), FUNCTIONS)
def test_every_option_is_a_keyword_with_its_default_and_an_explanation(function, kind):
    parameters = inspect.signature(function).parameters.values()
    keywords = {one.name: (one.default, one.annotation) for one in parameters if one.kind is one.KEYWORD_ONLY}
    assert keywords == {one.name: (one.default, one.type) for one in dataclasses.fields(kind)}
    assert [one.kind for one in parameters][:2] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2
    text = inspect.getdoc(function)
    assert [name for name in keywords if f"\n    {name}: " not in text] == []


@pytest.mark.parametrize("kind", [PackOptions, ReshardOptions, SelectOptions])
def test_every_option_has_a_group_and_a_sentence(kind):
    for one in declared_options(kind):
        assert one.metadata["group"] in GROUPS
        assert one.metadata["help"].endswith((".", ")."))
        assert not one.metadata["metavar"] or not isinstance(one.default, bool)


@pytest.mark.parametrize(
    ("function", "given", "meant"),
    [
        (wdskit.pack, "max_sample", "max_samples"),
        (wdskit.pack, "field", "fields"),
        (wdskit.pack, "from", "from_"),
        (wdskit.pack, "", "on"),
        (wdskit.reshard, "filters", "filter"),
        (wdskit.select, "samples", "sample"),
    ],
)
def test_an_unknown_option_names_the_most_similar_one(tmp_path, function, given, meant):
    wanted = f"{function.__name__}: there is no option {given!r}. Did you mean {meant!r}?"
    with pytest.raises(TypeError) as found:
        function(ROWS, tmp_path / "out", **{given: 1})
    assert str(found.value).startswith(wanted) or not given
    assert not (tmp_path / "out").exists()


def test_source_and_destination_have_names_too(tmp_path):
    assert wdskit.pack(source=ROWS, dest=tmp_path / "a").num_samples == 9
    assert wdskit.pack(ROWS, dest=tmp_path / "b", max_samples=4).num_samples == 9
    for given, number in (((), 0), ((ROWS,), 1), ((ROWS, tmp_path / "c", 3), 3)):
        with pytest.raises(TypeError, match=f"pack: {number} arguments without the options, not 2. Write pack"):
            wdskit.pack(*given, max_samples=3)
    assert not (tmp_path / "c").exists()


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
