"""The file that lists bad samples, when it cannot be written."""

from __future__ import annotations

from typing import Any

import pytest

from wdskit.loader.budget import Budget
from wdskit.pipeline.settings import ErrorsSpec


def test_a_folder_for_bad_samples_that_cannot_be_made_is_an_error_before_the_first_of_them(tmp_path: Any) -> None:
    (tmp_path / "file").touch()
    spec = ErrorsSpec(max_bad=3, dir=str(tmp_path / "file" / "bad"))
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        Budget(spec, name="pipeline", rank=0, num_samples=10)
