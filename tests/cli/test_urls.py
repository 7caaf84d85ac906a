"""The commands that read shards, over URLs: their output for a folder in a bucket is that for a local copy."""

from __future__ import annotations

import re
import tracemalloc
import urllib.request
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
from object_server import BUCKET, put, read_from
from shards import write_pictures, write_shard

from wdskit import cli, verify
from wdskit.shards.index import index_folder
from wdskit.shards.split import split
from wdskit.storage import requests


@pytest.fixture(autouse=True)
def environment(s3, tmp_path, monkeypatch):
    read_from(s3, monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(requests, "WAIT_S", 0.001)


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A local folder with a selection and classes; one shard's name has to be quoted in a URL."""
    folder = tmp_path_factory.mktemp("here") / "train"
    write_pictures(folder, [9, 0, 12, 7])
    (folder / "p-002.tar").rename(folder / "p-00#2 é.tar")
    (folder / "classes.json").write_text('{"ant": 0, "bee": 1, "cat": 2, "dog": 3, "emu": 4}')
    index_folder(folder, workers=1)
    split(folder, {"train": 0.7, "val": 0.3}, seed=3, workers=1)
    return folder


@pytest.fixture(scope="module")
def there(here, s3) -> str:
    upload(here, f"{s3}/{BUCKET}/read/train")
    return f"{BUCKET}/read/train"


def upload(folder: Path, url: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(".wdskit"):
            put(f"{url}/{quote(str(path.relative_to(folder)))}", path.read_bytes())


@pytest.fixture
def run(monkeypatch, capfdbinary):
    """A function that runs a command and returns exit code and output, without times."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["wdskit", *arguments])
        code = cli._run()
        out, err = capfdbinary.readouterr()
        return code, re.sub(r" in [\d.]+ s \(.*", "", (out + err).decode())

    return run


AT = "{at}/train"
COMMANDS = [
    ["info", AT, "--json"],
    ["info", f"{AT}/p-000.tar", "--json"],
    ["info", f"{AT}/p-{{000,001}}.tar", "--json"],
    ["info", f"{AT}/*0*.tar", "--json"],
    ["info", f"{AT}/p-003.tar", "--num", "3", "--json"],
    ["cat", f"{AT}/p-000.tar", "k003.json"],
    ["cat", f"{AT}/p-000.tar", "k003.gif"],
    ["verify", AT, "--json"],
    ["verify", f"{AT}/*.tar", "--images", "decode"],
    ["verify", f"{AT}/p-000.tar"],
]


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.usefixtures("there")
def test_a_command_says_what_it_says_of_a_local_copy(run, here, s3, command, scheme):
    remote = f"s3://{BUCKET}/read" if scheme == "s3" else f"{s3}/{BUCKET}/read"

    def result(at: str) -> tuple[int, str]:
        code, out = run(*(part.replace("{at}", at) for part in command))
        out = unquote(out.replace("\\u00e9", "é")).replace(f"{at}/", "").replace(at, "")
        out = re.sub(r"[ ]+\n?", " ", out)
        return code, out.replace("its files were not checked", "names and sizes of the files agree")

    if scheme == "http":  # a folder ends in a slash, and its columns are not read: a web server may lack ranges
        command = [f"{part}/" if part == AT else part for part in command]
    code, out = result(remote)
    expected_code, expected = result(str(here.parent))
    if command[0] == "info" and scheme == "http":
        expected = re.sub(r'"columns": \{".*?\}\}', '"columns": {}', expected)
    assert (code, out) == (expected_code, expected)


@pytest.mark.parametrize("place", ["disk", "s3", "http"])
def test_cat_takes_a_key_and_stops_at_its_sample(run, s3, tmp_path, place):
    """The bytes after the sample are not a shard: reading them would be an error."""
    samples = {key: {"json": f'{{"key": "{key}"}}'.encode()} for key in ("a", "b", "c")}
    whole = write_shard(tmp_path / "stops.tar", samples).read_bytes()
    start_of_c = 4 * 512  # a header and a payload of one block for each of the two samples before it
    damaged = whole[:start_of_c] + b"\1" * (len(whole) - start_of_c)
    (tmp_path / "stops.tar").write_bytes(damaged)
    put(f"{s3}/{BUCKET}/stops.tar", damaged)
    shard = {"disk": str(tmp_path / "stops.tar"), "s3": f"s3://{BUCKET}/stops.tar", "http": f"{s3}/{BUCKET}/stops.tar"}
    assert run("cat", shard[place], "a.json") == (0, '{"key": "a"}')
    code, out = run("cat", shard[place], "c.json")
    assert code == 1
    assert "stops.tar" in out


def test_all_that_is_wrong_in_a_bucket_is_found(here, s3):
    base = f"{s3}/{BUCKET}/wrong"
    upload(here, base)
    assert not verify(f"s3://{BUCKET}/wrong", images="none").findings
    data = bytearray((here / "p-000.tar").read_bytes())
    data[700] ^= 1
    put(f"{base}/p-000.tar", bytes(data))
    put(f"{base}/p-003.tar.idx", (here / "p-000.tar.idx").read_bytes())
    put(f"{base}/stray.tar", (here / "p-000.tar").read_bytes())
    delete(f"{base}/p-001.tar")
    put(f"{base}/classes.json", b"{")
    findings = verify(f"s3://{BUCKET}/wrong", images="none").findings
    assert sorted((one.kind, one.file.rpartition("/")[2]) for one in findings) == [
        ("beside", "index.json"),
        ("digest", "p-000.tar"),
        ("index", "classes.json"),
        ("missing", "p-001.tar"),
        ("offsets", "p-003.tar.idx"),
    ]
    assert [one.problem[:14] for one in findings if one.kind == "index"] == ["it is not JSON"]  # without the URL again


def delete(url: str) -> None:
    request = urllib.request.Request(url, method="DELETE")
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60).close()


def test_a_shard_is_verified_in_parts_and_never_held_whole(s3, tmp_path):
    folder = tmp_path / "large"
    write_pictures(folder, [1])
    large = {"a": {"bin": bytes(40 << 20)}, "b": {"bin": bytes(40 << 20)}}
    write_shard(folder / "large.tar", large)
    index_folder(folder, workers=1)
    upload(folder, f"{s3}/{BUCKET}/large")
    tracemalloc.start()
    try:
        result = verify(f"s3://{BUCKET}/large", images="none", workers=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not [one for one in result.findings if one.kind != "odd"]
    assert result.num_bytes > 80 << 20
    assert peak < 64 << 20
