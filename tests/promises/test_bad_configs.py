"""Every message for a bad configuration, word by word: bad_configs/*.yaml and messages.txt."""

from __future__ import annotations

import re
from typing import Any

import pytest
from folders import TESTS

from wdskit import ConfigError, load_config

FOLDER = TESTS / "promises" / "bad_configs"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))


def golden() -> dict[str, str]:
    """Return the expected messages by file name."""
    parts = re.split(r"^== (.+)\n", (FOLDER / "messages.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {name: message.rstrip("\n") for name, message in zip(parts[::2], parts[1::2], strict=True)}


@pytest.fixture(autouse=True)
def _in_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    monkeypatch.delenv("WDSKIT_UNSET", raising=False)


@pytest.mark.parametrize("name", FILES)
def test_bad_config_is_refused_in_these_words(name: str) -> None:
    """All problems at once, in the order of the file."""
    with pytest.raises(ConfigError) as caught:
        load_config(name)
    assert str(caught.value) == golden()[name]


@pytest.mark.parametrize("name", FILES)
def test_messages_are_readable(name: str) -> None:
    """Messages are "where: what. What to do.", in sentences, not too long, without Python types."""
    with pytest.raises(ConfigError) as caught:
        load_config(name)
    for problem in caught.value.problems:
        assert re.fullmatch(rf"{name}:\d+", problem.where)
        assert problem.rule.endswith((".", "?"))
        assert len(str(problem)) < 320
        assert not re.search(r"pydantic|https?:|NoneType|<class|\bstr\b(?!`)|\bdict_type\b", problem.rule)


def test_every_file_has_a_message_and_there_are_many() -> None:
    """The golden file is neither short nor stale."""
    assert list(golden()) == FILES
    assert len(FILES) >= 40


@pytest.mark.parametrize("stage", [{"decode": {"[a]": 3}}, {"to_dict": {"[names]x": 3}}, {"rename": {"[a]": 3}}])
def test_a_setting_or_a_field_whose_name_looks_like_a_mark_keeps_its_path(stage: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"\[(a|names)\]"):
        load_config({"pipeline": [{"exact": "x"}, stage, {"batched": 2}]})
