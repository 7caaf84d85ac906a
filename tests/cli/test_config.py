"""wdskit config check, show and schema: output and exit codes, word by word."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from shards import write_numbers
from typer.testing import CliRunner

from wdskit.cli import app as main_app
from wdskit.cli import main
from wdskit.shards.index import index_folder
from wdskit.stages import registry

GOOD = """\
version: 1
pipelines:
  train:
    - stream: a.tar
    - map: my_f
    - map_dict: {cls: my_g}
    - batched: 4
  val:
    - stream: b.tar
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_FUNCTIONS", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("good.yaml").write_text(GOOD)
    Path("bad.yaml").write_text(GOOD.replace("batched: 4", "batched: 0").replace("stream: b.tar", "strem: b.tar"))


def run(*arguments: str) -> tuple[Any, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["wdskit", "config", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
    return end.value.code, out.getvalue(), err.getvalue()


def test_check_of_a_good_file() -> None:
    """It prints the pipelines, and the functions that only a plugin or make_loader can provide."""
    out = (
        "good.yaml: ok\n"
        "train: stream -> map -> map_dict -> batched\n"
        "val: stream\n"
        "Note: not registered here: my_f, my_g. Name the module that registers them with --plugin.\n"
    )
    assert run("check", "good.yaml") == (0, out, "")


def test_check_of_a_bad_file() -> None:
    """It prints every problem on a line of stderr."""
    err = (
        "bad.yaml:7: pipelines.train[3].batched.size: Input should be greater than or equal to 1, not 0.\n"
        "bad.yaml:9: pipelines.val[0]: `strem` is not a stage. Did you mean `stream`?\n"
    )
    assert run("check", "bad.yaml") == (1, "", err)


def test_check_with_a_plugin() -> None:
    """A plugin may be a module of the current folder, as with python -m."""
    source = "import wdskit\n\n@wdskit.register('my_f')\ndef my_f(sample, by=1):\n    return sample\n"
    Path("wrong.yaml").write_text(GOOD.replace("map: my_f", "my_f: {bi: 2}"))
    Path("plugin_of_the_test.py").write_text(source)
    try:
        code, out, _ = run("check", "good.yaml", "--plugin", "plugin_of_the_test")
        _, _, err = run("check", "wrong.yaml", "--plugin", "plugin_of_the_test")
    finally:
        sys.modules.pop("plugin_of_the_test", None)
    assert code == 0
    assert "not registered here: my_g." in out
    assert err.startswith("wrong.yaml:5: pipelines.train[1].my_f.bi: no such setting.")


@pytest.mark.parametrize("command", ["check", "show"])
def test_an_unreadable_file_is_exit_code_2(command: str) -> None:
    """Other wrong uses of the command have the same exit code."""
    code, out, err = run(command, "missing.yaml")
    assert (code, out, err) == (2, "", "missing.yaml: the configuration cannot be read: No such file or directory.\n")
    assert run(command)[0] == 2


def test_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints the file's settings with variables and --set; showing that output gives the same text."""
    monkeypatch.setenv("WDSKIT_A", "data")
    Path("long.yaml").write_text(
        "version: 1\npipeline:\n  - stream: {shards: ['${WDSKIT_A}/a.tar'], seed: 0, check: sha256}\n"
        "  - shuffle: 5\nloader: {workers: 1}\n"
    )
    shown = (
        "version: 1\npipeline:\n- stream:\n    shards:\n    - data/a.tar\n    seed: 0\n    check: sha256\n"
        "- shuffle:\n    size: 5\n    initial: 7\nloader:\n  workers: 1\n"
    )
    assert run("show", "long.yaml", "--set", "pipeline.shuffle.initial=7") == (0, shown, "")
    Path("shown.yaml").write_text(shown)
    assert run("show", "shown.yaml") == (0, shown, "")
    assert run("show", "bad.yaml")[0] == 1


@pytest.mark.parametrize("command", [["config", "show"], ["plan"]])
def test_a_stage_of_a_plugin_is_known(command: list[str]) -> None:
    """A registered function that is used as a stage is unknown without its plugin."""
    Path("plugin_with_a_stage.py").write_text(
        "import wdskit\n@wdskit.register('brighter')\ndef brighter(sample, by=2):\n    return sample\n"
    )
    Path("stage.yaml").write_text("version: 1\npipeline:\n  - exact: data\n  - brighter: {by: 3}\n")
    write_numbers(Path("data"), [3])
    index_folder("data", workers=1)
    missing = CliRunner().invoke(main_app, [*command, "stage.yaml"])
    assert missing.exit_code
    assert "`brighter` is not a stage" in f"{missing.stderr}{missing.exception}"
    try:
        found = CliRunner().invoke(main_app, [*command, "stage.yaml", "--plugin", "plugin_with_a_stage"])
    finally:
        sys.modules.pop("plugin_with_a_stage", None)
    assert found.exit_code == 0, found
