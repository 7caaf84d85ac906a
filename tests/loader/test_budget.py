"""The file that lists bad samples, when it cannot be written."""

from __future__ import annotations

from typing import Any

import pytest

from wdskit import StorageError
from wdskit.loader.budget import Budget
from wdskit.pipeline.settings import ErrorsSpec
from wdskit.stages.base import RejectedSample


def test_a_list_of_bad_samples_that_cannot_be_written_names_its_setting_and_file(tmp_path: Any) -> None:
    budget = Budget(ErrorsSpec(max_bad=3, dir=str(tmp_path / "file" / "bad")), name="pipeline", rank=0, num_samples=10)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"errors\.dir: .*bad-pipeline-rank00000\.jsonl cannot be written"):
        budget.spend(0, [RejectedSample(1, "s.tar", "k", "broken")])
