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
    r"test_labels.py::.*\[.*: (leading zeros.*|listed leading zeros)\]",
    r"test_labels.py::.*\[(?!sidecar).*: text of a float\]",
    r"test_labels.py::.*\[(tar|tar json|rows|generator|sidecar): ((missing |empty )?names|names that.*)\]",
    r"test_labels.py::.*\[(tar|tar json|rows|generator|sidecar): (order of UTF-8|text of .*names)\]",
    r"test_labels.py::.*\[sidecar: (65 bits|listed .*|n.* that is not listed|number beyond .*)\]",
    r"test_labels.py::.*\[parquet: missing floats\]",
    r"test_labels.py::test_empty_member_and_sidecar_are_no_label",
    r"test_labels.py::test_mixture_shows_a_value_of_each_kind",
    r"test_labels.py::test_folder_of_a_system.*\[(__MACOSX|@eaDir|lost\+found)\]",
    r"test_labels.py::test_folder_that_holds_no_image.*",
    r"test_labels.py::test_empty_class_folder.*",
    r"test_labels.py::test_splits_are_not_taken_for_classes.*(extra|seg_train).*",
    r"test_labels.py::test_classes_two_levels_deep.*",
    r"test_labels.py::test_append_looks_names_up.*",
    r"test_labels.py::test_numbers_of_names.*",
    r"test_damage.py::test_foreign_or_newer_index.*\[newer\]",
    r"test_damage.py::test_tar_that_index_json_does_not_list.*",
    r"test_damage.py::test_damaged_classes_json.*\[list\]",
    r"test_damage.py::test_damaged_column.*",
    r"test_damage.py::test_damaged_file_of_a_killed_run.*",
    r"test_damage.py::test_entry_of_another_run.*",
    r"test_damage.py::test_dot_slash_before_a_name.*",
    r"test_damage.py::test_member_without_a_key.*\[.*(link|fifo|label|not UTF-8)\]",
    r"test_damage.py::test_second_archive_after_the_end.*",
    r"test_epochs.py::test_each_iteration_that_yielded_is_an_epoch",
    r"test_epochs.py::test_new_iterator_ends_an_older_one.*",
    r"test_epochs.py::test_state_whose_digest_is_no_text.*",
    r"test_bad_input.py::.*\[(sidecar|tar|rows), (no UTF-8|cut npy|no number)\]",
    r"test_bad_input.py::test_source_that.*\[(csv without a header|dots in a tar|tar of tars)\]",
    r"test_bad_input.py::test_unusual_source.*\[(coco, .*|NaN is null)\]",
    r"test_bad_input.py::test_(json_array|nan_in_a_float|panoptic|index_does_not_replace|relative_folder).*",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the list: each must fail on the second version."""
    for item in items:
        name = f"{item.path.name}::{item.name}"
        if IS_SECOND and any(re.fullmatch(pattern, name) for pattern in SECOND_VERSION_IS_WRONG):
            item.add_marker(pytest.mark.xfail(strict=True, reason="third version"))
