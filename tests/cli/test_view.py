"""The command `wdskit view`: its address, its end, and its refusals."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from shards import write_numbers

import wdskit
from wdskit.cli import view

RUN = [sys.executable, "-c", "from wdskit.cli import main; main()"]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_numbers(tmp_path / "train", [3])
    wdskit.index_folder("train")
    return tmp_path / "train"


def test_it_prints_its_address_answers_there_and_ends_with_ctrl_c(train: Path) -> None:
    process = subprocess.Popen(
        [*RUN, "view", "train", "--no-browser"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert address.startswith("http://127.0.0.1:")
    assert process.stdout.readline() == "Ctrl-C ends it.\n"
    with urllib.request.urlopen(f"{address}api/about", timeout=20) as answer:
        assert answer.read() == b'{"title":"train","num_samples":3}'
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        urllib.request.urlopen(address.rsplit("/", 2)[0] + "/", timeout=20)
    refused.value.close()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")


def test_the_page_is_opened_in_a_browser_unless_that_is_not_wanted(train: Path, run, monkeypatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(view.webbrowser, "open", opened.append)
    monkeypatch.setattr("wdskit.view.server.serve", lambda samples, *, port, on_start: on_start(f"http://x:{port}/"))
    assert run("view", "train", "--port", "8000") == (0, "http://x:8000/\nCtrl-C ends it.", "")
    assert run("view", "train", "--no-browser")[0] == 0
    assert opened == ["http://x:8000/"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["trian"], 1, "trian: there is no such shard or folder. Did you mean `train`?"),
        (["train", "--split", "val"], 1, "The folder has no split"),
        ([], 2, "give either DIR, or --config with a pipeline."),
        (["train", "--config", "c.yaml"], 2, "give either DIR, or --config with a pipeline."),
        (["train", "--rank", "1"], 2, "--rank needs --config."),
        (["train", "--world-size", "2"], 2, "--world-size needs --config."),
        (["train", "--gpus-per-node", "4"], 2, "--gpus-per-node needs --config."),
        (["--config", "c.yaml", "--split", "a"], 2, "--split is for DIR; a pipeline names its own split."),
        (["--config", "c.yaml"], 1, "c.yaml: the configuration cannot be read"),
        (["train", "--port", "65536"], 2, "Invalid value for '--port'"),
    ],
)
def test_what_it_cannot_show_is_one_message(train: Path, run, words: list[str], code: int, message: str) -> None:
    got, out, err = run("view", *words, "--no-browser")
    assert (got, out) == (code, "")
    assert message in " ".join(err.split())


def test_a_port_that_is_taken_is_one_message(train: Path, run) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = run("view", "train", "--no-browser", "--port", str(port))
    assert (code, out) == (1, "")
    assert err == f"port {port}: Address already in use. Choose another with --port, or leave it out."


def test_without_its_packages_it_names_the_extra(train: Path, run, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "wdskit.view.server", raising=False)
    code, _, err = run("view", "train", "--no-browser")
    assert (code, "pip install 'wdskit[view]'" in err) == (1, True)
