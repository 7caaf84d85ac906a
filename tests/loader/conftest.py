"""Shards that the tests of loaders share."""

from __future__ import annotations

import pytest
from shards import index_numbers, write_pictures

from wdskit.shards.index import index_folder


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> str:
    """The folder of six indexed shards with 39 samples."""
    return index_numbers(tmp_path_factory.mktemp("numbers"), [4, 5, 6, 7, 8, 9])


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, [20, 0, 32, 25])
    index_folder(folder)
    return str(folder)
