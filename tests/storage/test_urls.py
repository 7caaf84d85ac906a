"""Bytes by URL: local files and http(s) bodies, and the schemes that are refused."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wdskit import Pipeline
from wdskit.errors import ConfigError, StorageError
from wdskit.storage import requests
from wdskit.storage import urls as urls_module
from wdskit.storage.urls import LocalFile, is_local, local_path, open_stream, read_bytes, scheme_of
from wdskit.text import hide_secrets, public_url


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(requests, "WAIT_S", 0.001)
    monkeypatch.setattr(requests, "RETRIES", 2)
    monkeypatch.setattr(requests, "RETRY_S", 0.5)


def read_all(url: str, size: int = 5000) -> bytes:
    stream = open_stream(url)
    try:
        parts = []
        while part := stream.read(size):
            assert len(part) <= size
            parts.append(part)
        return b"".join(parts)
    finally:
        stream.close()


@pytest.mark.parametrize("scheme", ["abfs", "hdfs", "ftp", "data", "PIPE", "pipe", "git+ssh"])
def test_other_schemes_are_refused_by_name_before_anything_runs(scheme, tmp_path):
    url = f"{scheme}:touch {tmp_path}/ran" if scheme.lower() == "pipe" else f"{scheme}://bucket/a-{{0..3}}.tar"
    for refuse in (open_stream, scheme_of, is_local):
        with pytest.raises(StorageError, match=re.escape(f"`{scheme.lower()}:`")):
            refuse(url)
    with pytest.raises(ConfigError, match=re.escape(f"`{scheme.lower()}:`")):
        Pipeline().stream(url)
    assert list(tmp_path.iterdir()) == []


def test_paths_and_file_urls(tmp_path):
    path = tmp_path / "a b%.tar"
    path.write_bytes(b"data")
    assert read_all(str(path)) == read_all(path.as_uri()) == read_all(f"FILE://localhost{path.as_uri()[7:]}") == b"data"
    assert local_path("a%20b") == "a%20b"
    for url in (f"file://{path}", f"file://LOCALHOST{path}"):
        assert read_all(url.replace(" ", "%20").replace("%.", "%25.")) == b"data"
    with pytest.raises(StorageError, match="not file://elsewhere/"):
        open_stream(f"file://elsewhere{path}")
    for host in ("[::1", "[", "127.0.0.1", "user@localhost"):
        with pytest.raises(StorageError, match="a file URL names a file on this machine"):
            open_stream(f"file://{host}/a.tar")


@pytest.mark.parametrize(
    "name", ["a#1.tar", "a?b.tar", "a%41.tar", "a;b.tar", "ä\n.tar", "\udcff.tar", "s3:.tar", "{0}.tar"]
)
def test_any_file_name_has_a_url(name, tmp_path):
    """A file whose name is only the part before such a character is never read instead."""
    path = tmp_path / name
    path.write_bytes(b"data")
    for decoy in ("a", "aA.tar", "a%"):
        (tmp_path / decoy).write_bytes(b"decoy")
    assert read_all(path.as_uri()) == read_all(str(path)) == b"data"
    assert local_path(path.as_uri()) == str(path)


@pytest.mark.parametrize("url", ["a\x00.tar", "file:///a%00.tar", "\ud800.tar", "", "file:", "x" * 5000, "a.tar/b.tar"])
def test_what_cannot_be_a_file_name_cannot_be_opened(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.tar").write_bytes(b"data")
    with pytest.raises(StorageError, match="cannot be opened") as caught:
        open_stream(url)
    assert caught.value.url == url


@given(st.text(max_size=30) | st.text(alphabet="file:/%?#[]@~.s3{}\x00\ud800 ", max_size=20))
@settings(max_examples=300)
def test_any_text_is_a_stream_or_a_storage_error(text):
    try:
        if is_local(text):
            LocalFile(text).close()
    except StorageError as err:
        shown = err.url
        assert shown in (hide_secrets(text), hide_secrets(public_url(text)))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_a_system_that_refuses_is_told_in_its_words(number, tmp_path, monkeypatch):
    """Errors come at opening and at reading. They are simulated, because tests may run as root."""
    path = tmp_path / "a.tar"
    path.write_bytes(b"data")
    stream = LocalFile(str(path))

    def refuse(*args):
        raise OSError(number, os.strerror(number))

    for name in ("open", "read", "pread"):
        monkeypatch.setattr(urls_module.os, name, refuse)
    for attempt in (lambda: LocalFile(str(path)), lambda: stream.read(1), lambda: stream.read_at(0, 1)):
        with pytest.raises(StorageError, match=re.escape(f": {os.strerror(number)}.")) as caught:
            attempt()
        assert caught.value.url == str(path)
    stream.close()


def test_a_small_file_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "index.json")
    with pytest.raises(StorageError, match="this is not a plain file"):
        read_bytes(str(tmp_path / "index.json"), limit=100)
