"""No output of a command, message, log, state, repr, report or metric shows a URL's signature or password."""

from __future__ import annotations

import http.server
import json
import logging
import pickle
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from formats import write_tar

import wdskit
from wdskit import Pipeline, WdskitError, index_folder

SIGNATURE, PASSWORD = "hush/Qx7+ab=", "pa55%word"
SECRETS = ("hush", "Qx7", "pa55", "word@")


class Server(http.server.BaseHTTPRequestHandler):
    """Serves one shard, and answers other names with the whole URL as its reason."""

    protocol_version = "HTTP/1.1"
    data = b""

    def do_GET(self) -> None:
        is_there = self.path.startswith("/s-000.tar?")
        self.send_response(200 if is_there else 418, None if is_there else f"no \x1b[31m{self.path}")
        self.send_header("Content-Length", str(len(self.data) if is_there else 0))
        self.end_headers()
        if is_there:
            self.wfile.write(self.data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The host and port of a server of one shard."""
    folder = tmp_path_factory.mktemp("shards")
    write_numbers(folder, 20)
    Server.data = (folder / "s-000.tar").read_bytes()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def urls_of(host: str) -> dict[str, str]:
    return {
        "there": f"http://{host}/s-000.tar?sig={SIGNATURE}",
        "missing": f"http://{host}/t-000.tar?sig={SIGNATURE}",
        "password": f"http://me:{PASSWORD}@{host}/s-000.tar",
        "both": f"http://me:{PASSWORD}@{host}/s-{{000..001}}.tar?sig={SIGNATURE}",
        "space": f"http://{host}/s-000.tar?x=a b&sig={SIGNATURE} {SIGNATURE}",
        "tab": f"http://{host}/s-000\t.tar?sig=\t{SIGNATURE}",
        "bucket": f"s3://me:{PASSWORD}@bucket/s-000.tar?X-Amz-Signature={SIGNATURE}",
        "slash": f"s3://me:{SIGNATURE}@bucket/s-000.tar",
        "scheme": f"ftp://me:{PASSWORD}@{host}/s-000.tar?sig={SIGNATURE}",
    }


COMMANDS = {
    "pack": [["{url}", "{out}"], ["{out}/in", "{url}"]],
    "index": [["{url}"]],
    "info": [["{url}"], ["{url}", "--json"], ["{local}/s-000.tar::{url}"]],
    "reshard": [["{url}", "{out}"]],
    "split": [["{url}", "train=.5,val=.5"]],
    "plan": [["{config}"], ["{config}", "--set", "pipeline.0.stream.shards={url}"]],
    "bench": [["{config}", "--seconds", "0.1"]],
    "verify": [["{url}"], ["{url}", "--json"]],
    "cat": [["{url}", "n000001.cls"], ["{url}", "nothing.cls"]],
    "view": [["{url}", "--no-open"]],
    "config check": [["{config}"], ["{config}", "--set", "pipeline.0={url}"], ["{config}", "--set", "{url}"]],
    "config show": [["{config}"], ["{config}", "--set", "loader.workers={url}"]],
    "config schema": [["{url}"]],
}
"""Arguments that are tried with each command; all are also tried with one word too many."""


def check(text: str) -> None:
    text = text.replace("words", "")
    assert not [secret for secret in SECRETS if secret in text], text


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_shows_a_signature_or_a_password(
    run: Any, server: str, tmp_path: Path, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "in").mkdir()
    write_numbers(tmp_path / "local", 5)
    for number, (kind, url) in enumerate(urls_of(server).items()):
        config = tmp_path / f"{kind}.yaml"
        config.write_text(f"version: 1\npipeline:\n  - stream: {{shards: {json.dumps(url)}}}\n  - batched: 4\n")
        values = {
            "url": url,
            "config": str(config),
            "out": str(tmp_path / str(number)),
            "local": str(tmp_path / "local"),
        }
        first, *others = COMMANDS[command]
        for words in [first, *(others if kind == "there" else ()), [*first, "{url}"]]:
            code, out, err = run(*command.split(), *(word.format(**values) for word in words))
            check(f"{out}\n{err}\n{caplog.text}")
            assert code in (0, 1, 2), (words, out, err)
    for path in tmp_path.rglob("*"):  # reports, logs and plans
        if path.is_file() and path.suffix != ".yaml":
            check(path.read_bytes().decode(errors="replace"))


def write_numbers(folder: Path, count: int) -> None:
    write_tar(folder / "s-000.tar", {f"n{number:06d}": {"cls": b"%d" % number} for number in range(count)})


def broken(_: Any) -> None:
    raise ValueError("broken")


@pytest.mark.parametrize("workers", [0, 1])
def test_no_loader_shows_a_signature(
    server: str, workers: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """This holds for samples, states, messages and statistics, in workers too."""
    caplog.set_level(logging.DEBUG)
    url = urls_of(server)["there"]
    pipe = Pipeline().stream(url).split_by_node().split_by_worker()
    loader = pipe.batched(4).loader(workers=workers)
    batches = list(loader)
    assert len(batches) == 5
    shown = [repr(loader), repr(pipe), repr(pipe.stages), str(pipe.stages), repr(batches), repr(loader.state_dict())]
    shown += [
        repr(pickle.dumps(loader.state_dict())),
        loader.stats().line(),
        repr(loader.stats()),
    ]
    for bad in (pipe.map(broken), pipe.decode("rgb8").to_tuple("png")):
        loader = bad.batched(4).loader(workers=workers)
        with pytest.raises(WdskitError) as caught:
            list(loader)
        shown += ["".join(traceback.format_exception(caught.value)), repr(vars(caught.value))]
    shown += [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    check("\n".join([*shown, caplog.text]))


@pytest.mark.parametrize("kind", urls_of(""))
def test_no_error_or_configuration_shows_a_secret(server: str, kind: str) -> None:
    url = urls_of(server)[kind]
    config: Any = {"pipeline": [{"stream": url}, {"batched": 4}]}
    shown = []
    for call in (
        lambda: list(wdskit.make_loader(config, workers=0)),
        lambda: wdskit.make_loader(config, workers=0, overrides=[f"loader.workers={url}"]),
        lambda: Pipeline().exact(url).batched(4).loader(workers=0),
        lambda: Pipeline().exact([url, "x"], split="train").batched(4).loader(workers=0),
        lambda: list(Pipeline().stream(f"{url}::{url}").loader(workers=0)),
        lambda: wdskit.LocalShard(url),
        lambda: wdskit.verify(url),
        lambda: index_folder(url),
    ):
        try:
            shown.append(repr(call()))
        except WdskitError as err:
            shown += ["".join(traceback.format_exception(err)), repr(vars(err)), repr(err)]
    check("\n".join(shown))
