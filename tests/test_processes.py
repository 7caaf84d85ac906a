"""What packing does to Python's garbage collector is undone, and nothing is done where somebody did it before."""

from __future__ import annotations

import gc

import pytest

from wdskit.processes import old_objects_frozen


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the collector, which the tests themselves have frozen."""
    asked: list[str] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: asked.count("freeze") and not asked.count("unfreeze"))
    monkeypatch.setattr(gc, "freeze", lambda: asked.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: asked.append("unfreeze"))
    return asked


def test_what_is_there_is_frozen_until_the_end(calls):
    with old_objects_frozen() as freeze:
        assert calls == ["freeze"]
        freeze()
        with old_objects_frozen() as again:  # of a source that packs itself
            again()
        assert calls == ["freeze", "freeze"]
    assert calls == ["freeze", "freeze", "unfreeze"]


def test_after_an_error_it_is_undone_too(calls):
    with pytest.raises(KeyError), old_objects_frozen():
        raise KeyError
    assert calls == ["freeze", "unfreeze"]


def test_what_somebody_has_frozen_stays_as_it_is(calls):
    calls.append("freeze")
    with old_objects_frozen() as freeze:
        freeze()
    assert calls == ["freeze"]
