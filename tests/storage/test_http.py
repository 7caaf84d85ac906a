"""http(s) bodies: what only web servers, proxies and redirects do. Faults of every store are in `test_objects.py`."""

from __future__ import annotations

import threading

import pytest
from fault_server import BODY, FaultServer
from folders import GOLDEN

from wdskit import Pipeline
from wdskit.errors import StorageError
from wdskit.storage import objects, requests, stores
from wdskit.storage.urls import open_stream, read_bytes

PEM, CA = GOLDEN / "loopback_leaf.pem", GOLDEN / "loopback_ca.pem"
"""A certificate for 127.0.0.1 with its key, and the authority that signed it, which nothing else trusts."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Set short waits."""
    monkeypatch.setattr(requests, "WAIT_S", 0.001)
    monkeypatch.setattr(requests, "RETRIES", 2)
    monkeypatch.setattr(objects, "PIECE_BYTES", 1)
    requests.loop_of_this_process("").stores.clear()


@pytest.mark.parametrize("name", ["cut_anonymous", "cut_weak"])
def test_body_without_a_validator_is_not_pieced_together(faults, name):
    with pytest.raises(StorageError, match="the connection broke after 1000 of 3000000 bytes, and without an ETag"):
        read_bytes(f"{faults.url}/{name}.tar", limit=len(BODY))
    assert len(faults.requests) == 1


def test_stream_that_is_read_slowly_is_read(faults, monkeypatch):
    """The training may take minutes for a batch: only the time of waiting for the server counts."""
    monkeypatch.setattr(objects, "PART_S", 0.3)
    monkeypatch.setattr(stores, "READ_S", 0.3)
    stream = open_stream(f"{faults.url}/ok.tar")
    found = b""
    while part := stream.read(500_000):
        found += part
        threading.Event().wait(0.1)
    stream.close()
    assert found == BODY


def test_web_page_is_no_damaged_shard(faults):
    with pytest.raises(StorageError, match=r"/page\.tar: this is a web page, not a tar\."):
        list(Pipeline().stream(f"{faults.url}/page.tar").to_tuple("__key__").loader(workers=0))


def test_redirect_tells_the_other_host_neither_query_nor_password_of_the_proxy(faults, monkeypatch):
    with FaultServer() as proxy:
        proxy.location = f"{faults.url}/ok.tar?part=1"
        monkeypatch.setenv("http_proxy", f"http://user:hush@{proxy.url.removeprefix('http://')}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert read_bytes("http://data.invalid/moved.tar?sig=hush", limit=len(BODY)) == BODY
        assert "Proxy-Authorization" in {name.title() for name in proxy.requests[0][1]}
    assert {path for path, _ in faults.requests} == {"/ok.tar?part=1"}
    assert "hush" not in str(faults.requests)


@pytest.mark.parametrize("query", ["", "?sig=hush"])
def test_redirects_never_lead_from_https_to_http(faults, query, monkeypatch):
    with FaultServer(PEM) as safe:
        safe.location, faults.location = f"{faults.url}/ok.tar", f"{safe.url}/ok.tar"
        with pytest.raises(StorageError, match="its TLS certificate is not trusted") as caught:
            open_stream(f"{safe.url}/ok.tar{query}")
        assert "tries" not in str(caught.value)
        requests.loop_of_this_process("").stores.clear()
        monkeypatch.setenv("SSL_CERT_FILE", str(CA))
        with pytest.raises(StorageError, match="its redirect is not followed: it leads from https to http"):
            open_stream(f"{safe.url}/moved.tar{query}")
        assert faults.requests == []
        assert read_bytes(f"{faults.url}/moved.tar{query}", limit=len(BODY)) == BODY
