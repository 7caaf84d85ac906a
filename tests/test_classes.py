"""`classes.json`: names by number, or an error where a number would get another one's name."""

from __future__ import annotations

import itertools
import json

import pytest

from wdskit.dataset.classes import read_classes
from wdskit.errors import FolderIndexError


@pytest.mark.parametrize("numbers", [*itertools.product(range(-1, 3), repeat=2)])
def test_numbers_are_those_of_the_names_or_refused(tmp_path, numbers):
    (tmp_path / "classes.json").write_text(json.dumps(dict(zip(("dog", "cat"), numbers, strict=True))))
    if sorted(numbers) == [0, 1]:
        names = read_classes(tmp_path)
        assert names is not None
        assert [names[number] for number in numbers] == ["dog", "cat"]
    else:
        with pytest.raises(FolderIndexError, match="the numbers of its 2 classes are not 0 to 1, each once"):
            read_classes(tmp_path)


@pytest.mark.parametrize("text", ["7", '{"cat": "0"}', '{"cat": true}', '["cat", 1]', "{", "[" * 100_000])
def test_what_is_no_list_of_names_is_an_error(tmp_path, text):
    (tmp_path / "classes.json").write_text(text)
    with pytest.raises(FolderIndexError, match=r"classes\.json: it is no "):
        read_classes(tmp_path)


def test_a_list_is_taken_as_it_is_and_nothing_as_none(tmp_path):
    assert read_classes(tmp_path) is None
    (tmp_path / "classes.json").write_text('["b", "a", "b"]')
    assert read_classes(tmp_path) == ("b", "a", "b")
