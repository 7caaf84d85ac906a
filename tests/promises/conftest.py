"""Marks the promises that the second version does not keep. The list goes when the third version is in place."""

from __future__ import annotations

import re

import pytest
from second_version import IS_SECOND

SECOND_VERSION_IS_WRONG = [
    r"test_same_bytes.py::test_source_with.*\[.*(number|shuffle|split).*-generator\]",
    r"test_same_bytes.py::test_json_sidecar_keeps_its_own_members_first",
    r"test_same_bytes.py::test_npy_field_has_one_dtype_in_all_rows",
    r"test_same_bytes.py::test_hashed_keys_of_two_downloads_with_counters_differ",
    r"test_same_bytes.py::test_odd_characters_of_keys_are_cleaned_by_default",
    r"test_same_bytes.py::test_resize_shrinks.*\[turned\]",
    r"test_same_bytes.py::test_resize_refuses_json.*",
    r"test_same_bytes.py::test_index_lists_the_files_of_the_data_set_only",
    r"test_kills.py::test_a_changed_run_after_a_kill.*",
    r"test_kills.py::test_foreign_work_folder_is_refused.*",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the list: each must fail on the second version."""
    for item in items:
        name = f"{item.path.name}::{item.name}"
        if IS_SECOND and any(re.fullmatch(pattern, name) for pattern in SECOND_VERSION_IS_WRONG):
            item.add_marker(pytest.mark.xfail(strict=True, reason="third version"))
