"""tools/dev/check_size.py counts lines of code, and fails above the number in pyproject.toml."""

from __future__ import annotations

import pytest


def test_one_line_more_than_the_limit_is_an_error(
    load_tool, monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = load_tool("check_size")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "wdskit").mkdir()
    (tmp_path / "wdskit" / "a.py").write_text("a = 1\n\n# why\nb = 2\n")
    (tmp_path / "pyproject.toml").write_text("[tool.wdskit]\nmax_code_lines = 2\n")
    assert tool.main([]) == 0
    (tmp_path / "pyproject.toml").write_text("[tool.wdskit]\nmax_code_lines = 1\n")
    assert tool.main([]) == 1
    assert "wdskit/ has 2 lines of code, and max_code_lines in pyproject.toml is 1" in capsys.readouterr().out
    (tmp_path / "pyproject.toml").write_text("")
    assert tool.main([]) == 1
