"""wdskit config check, show and schema: output and exit codes, word by word."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wdskit.cli.config import app
from wdskit.pipeline.settings import json_schema
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


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_check_of_a_good_file() -> None:
    """Its pipelines, and the functions that only a plugin or make_loader can give."""
    out = (
        "good.yaml: ok\n"
        "train: stream -> map -> map_dict -> batched\n"
        "val: stream\n"
        "Note: not registered here: my_f, my_g. Name the module that registers them with --plugin.\n"
    )
    assert run("check", "good.yaml") == (0, out, "")


def test_check_of_a_bad_file() -> None:
    """Every problem, one a line, on stderr."""
    err = (
        "bad.yaml:7: pipelines.train[3].batched: 0 is too small; it must be at least 1.\n"
        "bad.yaml:9: pipelines.val[0]: `strem` is not a stage. Did you mean `stream`?\n"
    )
    assert run("check", "bad.yaml") == (1, "", err)


def test_check_with_overrides() -> None:
    """As load_config takes them."""
    code, out, _ = run(
        "check", "bad.yaml", "--set", "pipelines.train.batched=8", "--set", "pipelines.val.0={stream: b.tar}"
    )
    assert code == 0
    assert out.startswith("bad.yaml: ok\n")
    code, _, err = run("check", "good.yaml", "--set", "loader.worker=8")
    assert (code, err) == (1, "--set loader.worker=8: loader.worker: no such setting. Did you mean `workers`?\n")


def test_check_with_a_plugin() -> None:
    """A module of the current folder too, as with python -m."""
    source = "import wdskit\n\n@wdskit.register('my_f')\ndef my_f(sample):\n    return sample\n"
    Path("plugin_of_the_test.py").write_text(source)
    try:
        code, out, _ = run("check", "good.yaml", "--plugin", "plugin_of_the_test")
    finally:
        sys.modules.pop("plugin_of_the_test", None)
    assert code == 0
    assert "not registered here: my_g." in out


@pytest.mark.parametrize("command", ["check", "show"])
def test_an_unreadable_file_is_exit_code_2(command: str) -> None:
    """As are other wrong uses of the command."""
    code, out, err = run(command, "missing.yaml")
    assert (code, out, err) == (2, "", "missing.yaml: the configuration cannot be read: No such file or directory.\n")
    assert run(command)[0] == 2


def test_a_broken_plugin_is_exit_code_2() -> None:
    """With what went wrong in it."""
    Path("broken_plugin_of_the_test.py").write_text("1 / 0\n")
    code, _, err = run("check", "good.yaml", "--plugin", "broken_plugin_of_the_test")
    assert (code, err) == (
        2,
        "--plugin broken_plugin_of_the_test: cannot be imported: ZeroDivisionError: division by zero\n",
    )
    assert run("check", "good.yaml", "--plugin", "no_such_module_at_all")[0] == 2


def test_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it comes to, and the same again when that is shown."""
    monkeypatch.setenv("WDSKIT_A", "data")
    Path("long.yaml").write_text(
        "version: 1\npipeline:\n  - stream: {shards: ['${WDSKIT_A}/a.tar'], seed: 0, check: sha256}\n"
        "  - shuffle: {size: 5}\nloader: {workers: 1}\n"
    )
    shown = "version: 1\npipeline:\n  - stream: {shards: [data/a.tar], check: sha256}\n  - shuffle: 7\n"
    assert run("show", "long.yaml", "--set", "pipeline.shuffle=7") == (0, shown, "")
    Path("shown.yaml").write_text(shown)
    assert run("show", "shown.yaml") == (0, shown, "")
    assert run("show", "bad.yaml")[0] == 1


def test_schema() -> None:
    """One JSON document."""
    code, out, _ = run("schema")
    assert code == 0
    assert json.loads(out) == json_schema()
