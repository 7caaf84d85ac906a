"""A long wait for a batch is logged with the worker and its sample, and ends after `timeout`."""

from __future__ import annotations

import multiprocessing
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from shards import index_numbers, number_of

from wdskit import Pipeline, PipelineError
from wdskit.stages import run


@pytest.fixture
def pattern(tmp_path: Path, monkeypatch: Any) -> str:
    monkeypatch.setattr(run, "REPORT_S", 0.2)
    return index_numbers(tmp_path / "numbers", [40, 40])


def hang_at_16(sample: Any) -> int:
    if int(sample["cls"]) == 16:
        threading.Event().wait()
    return int(sample["cls"])


def loop_at_16(sample: Any) -> int:
    while int(sample["cls"]) == 16:
        pass
    return int(sample["cls"])


def hang_with_16(batch: Any) -> Any:
    if 16 in batch.tolist():
        threading.Event().wait()
    return batch


FORK = {"start_method": "fork"}


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (hang_at_16, {"workers": 0, "threads": 2}),
        (loop_at_16, {"workers": 2, **FORK}),
        (hang_with_16, {"workers": 1, "threads": 2, **FORK}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_hangs_is_logged_and_ends_with_the_timeout(
    caplog: Any, capfd: Any, pattern: str, function: Any, settings: dict[str, Any]
) -> None:
    pipe = Pipeline().sequential(pattern, tail="drop")
    pipe = pipe.map(number_of).batched(4).map(function) if function is hang_with_16 else pipe.map(function).batched(4)
    who = r"worker \d \(pid \d+\)" if settings["workers"] else "this process"
    sample = r"sample 16 of \S*s-000.tar"
    if function is hang_with_16:
        sample = r"the batch of sample 16 of \S*s-000.tar"
    what = rf"no batch has come from {who} for \d s\. It is at .*{sample}.*\."
    with pytest.raises(PipelineError, match=rf"^no batch came within 2 s \(timeout\): {what}\n  Correct what hangs"):
        list(pipe.loader(timeout=2, **settings))
    assert any(re.search(rf"{who}.*{sample}", message) for message in caplog.messages)
    assert f" in {function.__name__}\n" in capfd.readouterr().err
    assert not multiprocessing.active_children()


def test_an_epoch_after_a_timeout_works(pattern: str, tmp_path: Path) -> None:
    """The thread that hangs keeps the lock of users' functions; the next epoch has a new one."""
    flag = tmp_path / "hangs"
    flag.touch()

    def hang_once(sample: Any) -> int:
        if int(sample["cls"]) == 16 and flag.exists():
            flag.unlink()
            threading.Event().wait()
        return int(sample["cls"])

    pipe = Pipeline().sequential(pattern, tail="drop").map(hang_once).batched(4)
    loader = pipe.loader(workers=0, threads=2, timeout=0.5)
    with pytest.raises(PipelineError, match="sample 16 of"):
        list(loader)
    loader.set_epoch(0)
    assert len(list(loader)) == 20
