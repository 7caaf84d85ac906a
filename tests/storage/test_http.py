"""http(s) bodies over a network that sometimes fails, from a real server on loopback."""

from __future__ import annotations

import http.server
import os
import re
import ssl
import threading
import traceback
from dataclasses import dataclass

import pytest
from folders import GOLDEN
from shards import write_shard

from wdskit import Pipeline
from wdskit.errors import StorageError
from wdskit.storage import objects, requests, stores
from wdskit.storage.urls import open_stream, read_bytes

BODY = bytes(range(256)) * 1000
PEM, CA = GOLDEN / "loopback_leaf.pem", GOLDEN / "loopback_ca.pem"
"""A certificate for 127.0.0.1 with its key, and the authority that signed it, which nothing else trusts."""


@dataclass
class Endless:
    """A response that starts with `head` and repeats `part` until the client closes."""

    head: bytes
    part: bytes
    pause_s: float = 0


class Shaky(http.server.ThreadingHTTPServer):
    """A handler that answers by a script: one entry per request, the last entry for all later ones.

    Attributes:
        script: A status with headers, an `Endless`, or a number of bytes after which the body is cut; None gives the
            rest.
        etag: Validator of the file; empty for none.
        body: The file.
        asked: The Range header of each request.
        paths: The path of each request.
        headers: All headers of each request.
        gives_parts: Whether Range is supported.
    """

    daemon_threads = True

    def __init__(self, *script, etag='"one"', body=BODY, gives_parts=True):
        super().__init__(("127.0.0.1", 0), Answer)
        self.script, self.etag, self.body = list(script), etag, body
        self.gives_parts = gives_parts
        self.asked = []
        self.paths = []
        self.headers = []
        self.scheme = "http"
        self.validators = []

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,)).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        pass  # the client has closed the connection

    @property
    def url(self):
        return f"{self.scheme}://127.0.0.1:{self.server_port}/a.tar"


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        server.asked.append(self.headers.get("Range"))
        server.paths.append(self.path)
        server.headers.append(dict(self.headers))
        server.validators.append(self.headers.get("If-Match"))
        step = server.script[min(len(server.asked), len(server.script)) - 1]
        self.close_connection = True
        if callable(step):
            step = step(server)
        if step == "nothing":
            return
        if isinstance(step, Endless):
            self.wfile.write(step.head)
            while True:
                self.wfile.write(step.part)
                threading.Event().wait(step.pause_s)
        if isinstance(step, tuple):
            status, headers = step
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        is_part = match and server.gives_parts
        start = int(match[1]) if is_part else 0
        if self.headers.get("If-Match", server.etag) != server.etag:
            self.send_response(412)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        rest = server.body[start:]
        self.send_response(206 if is_part else 200)
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{len(server.body) - 1}/{len(server.body)}")
        if server.etag:
            self.send_header("ETag" if server.etag.startswith(('"', "W/")) else "Last-Modified", server.etag)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest if step is None else rest[:step])

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Set short waits, and an environment without proxies."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(requests, "WAIT_S", 0.001)
    monkeypatch.setattr(requests, "RETRY_S", 5.0)
    monkeypatch.setattr(objects, "PIECE_BYTES", 1)


def read_all(url):
    return read_bytes(url, limit=1 << 30)


@pytest.mark.parametrize(
    "failure", [(503, {}), (500, {}), (502, {}), (504, {}), (429, {}), (408, {}), "nothing"], ids=str
)
def test_what_passes_is_tried_again(failure, monkeypatch):
    with Shaky(failure, failure, failure, failure, None) as server:
        assert read_all(server.url) == BODY
    monkeypatch.setattr(requests, "RETRY_S", 1.0)
    with Shaky(failure) as server:
        with pytest.raises(StorageError, match=r"\(\d+ tries in [01] s\)") as caught:
            read_all(server.url)
        assert caught.value.status == (0 if failure == "nothing" else failure[0])


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 416])
def test_what_does_not_pass_is_asked_for_once(status):
    with Shaky((status, {})) as server:
        with pytest.raises(StorageError, match=f"the server answered {status}|there is no such object") as caught:
            read_all(server.url)
        assert caught.value.status == status
        assert len(server.asked) == 1 + (status in (401, 416))  # with new credentials, or without a range


def test_a_query_is_sent_and_stands_in_no_message():
    """The query may be a signature."""
    moved = (302, {"Location": "ftp://127.0.0.1/a.tar?sig=hush"})
    for script in (
        [(403, {})],
        [(503, {})],
        ["nothing"],
        [None, 1],
        [moved],
        [None, (200, {"Content-Encoding": "gzip"})],
    ):
        with Shaky(*script, gives_parts=False) as server:
            with pytest.raises(StorageError) as caught:
                read_all(f"{server.url}?sig=hush")
            assert "hush" not in "".join(traceback.format_exception(caught.value)).replace('sig=hush")', "")
            assert "hush" not in "".join(map(str, (caught.value, caught.value.url)))
            assert server.paths[0] == "/a.tar?sig=hush"
    with pytest.raises(StorageError) as caught:
        read_all("http://127.0.0.1:1/a b?sig=hush me")
    assert "hush" not in str(caught.value)


def test_nobody_who_listens_is_an_error():
    with Shaky(None) as server:
        url = server.url
    for query in ("", "?sig=hush"):
        with pytest.raises(StorageError, match=r"the connection failed: Connection refused \(9 tries in \d+ s\)\."):
            read_all(url + query)


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "slow",
    [
        Endless(OK + b"Content-Length: 9999\r\n\r\n", b"x", 0.01),
        Endless(OK, b"X", 0.01),
        Endless(OK, b"A: b\r\n", 0.01),
        Endless(b"", b"H", 0.01),
        Endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.01),
    ],
    ids=["body", "header", "headers", "status", "continue"],
)
@pytest.mark.parametrize("query", ["", "?sig=hush"])
def test_a_server_that_sends_a_byte_now_and_then_is_an_error(slow, query, monkeypatch):
    monkeypatch.setattr(objects, "PART_S", 0.3)
    monkeypatch.setattr(requests, "REDIRECT_S", 0.3)
    with Shaky(slow) as server, pytest.raises(StorageError, match=r"did not (arrive|answer)|the connection failed"):
        read_all(server.url + query)


def test_headers_without_end_are_an_error(monkeypatch):
    monkeypatch.setattr(requests, "RETRIES", 1)
    for part in (b"HTTP/1.1 100 Continue\r\n\r\n" * 100, b"A: b\r\n" * 100):
        monkeypatch.setattr(objects, "PART_S", 1.0)
        with Shaky(Endless(b"" if b"100" in part else OK, part)) as server, pytest.raises(StorageError):
            read_all(server.url)


def test_the_body_of_a_redirect_is_not_read():
    with Shaky(None) as last:
        moved = f"HTTP/1.1 302 Found\r\nLocation: {last.url}\r\nContent-Length: {10**15}\r\n\r\n".encode()
        with Shaky(Endless(moved, b"x" * 1000)) as first:
            assert read_all(first.url) == BODY


def test_a_stream_that_is_read_slowly_is_read(monkeypatch):
    """The training may take minutes for a batch: only the time of waiting for the server counts."""
    monkeypatch.setattr(objects, "PART_S", 0.3)
    monkeypatch.setattr(stores, "READ_S", 0.3)
    with Shaky(None, body=bytes(9 << 20)) as server:
        stream = open_stream(server.url)
        num_bytes = 0
        while part := stream.read(3 << 20):
            num_bytes += len(part)
            threading.Event().wait(0.1)
        stream.close()
    assert num_bytes == 9 << 20


@pytest.mark.parametrize("etag", ['"one"', "Sun, 06 Nov 1994 08:49:37 GMT"])
def test_a_cut_body_goes_on_where_it_was_cut(etag):
    for cuts in ([1], [1000, 1], [len(BODY) - 1], [100_000, 100_000], [0, 0, 0, 0]):
        with Shaky(*cuts, None, etag=etag) as server:
            assert read_all(server.url) == BODY
            starts = [sum(cuts[:at]) for at in range(len(cuts) + 1)]
            assert server.asked == [f"bytes={start}-{len(BODY) - 1 if start else ''}" for start in starts]
            assert server.validators == [None, *((etag if etag == '"one"' else None) for _ in cuts)]


def test_tries_of_one_part_are_bounded():
    with Shaky(1) as server:
        with pytest.raises(StorageError, match=r"\(9 tries in"):
            read_all(server.url)
        assert len(server.asked) == 9


@pytest.mark.parametrize("etag", ["", 'W/"one"'])
def test_a_body_without_a_validator_is_not_pieced_together(etag):
    with Shaky(1000, None, etag=etag) as server:
        with pytest.raises(StorageError, match="the connection broke after 1000 of 256000 bytes, and without an ETag"):
            read_all(server.url)
        assert len(server.asked) == 1


def test_bytes_of_two_files_are_never_one_body():
    def change(server):
        server.etag, server.body = '"two"', BODY[::-1]

    with Shaky(1000, change) as server, pytest.raises(StorageError, match="the object was replaced while it was read"):
        read_all(server.url)
    with (
        Shaky(None, 1000, None, gives_parts=False) as server,
        pytest.raises(StorageError, match=r"the server sent bytes \(0, 256000\), but \(1000, 256000\) were requested"),
    ):
        read_all(server.url)


@pytest.mark.parametrize(
    "lie", [{"Content-Range": "bytes 999-5/6"}, {"Content-Range": "bytes 1000-1000/1001", "ETag": '"two"'}, {}]
)
def test_a_part_that_is_not_the_one_asked_for_is_refused(lie):
    with Shaky(1000, (206, lie)) as server, pytest.raises(StorageError):
        read_all(server.url)


def test_a_stream_reads_through_cuts_and_refusals(tmp_path):
    samples = {f"k{number:03d}": {"txt": bytes(3000)} for number in range(100)}
    body = write_shard(tmp_path / "a.tar", samples).read_bytes()
    with Shaky((503, {}), 50_000, 100_000, (429, {}), None, body=body) as server:
        pipe = Pipeline().stream(server.url, shuffle_shards=False).to_tuple("__key__").batched(10)
        assert [key for (keys,) in pipe.loader(workers=0) for key in keys] == list(samples)
        assert len(server.asked) == 5


@pytest.mark.parametrize("page", [b"<!DOCTYPE HTML>\n<title>Directory listing</title>", b"\n<html><body>Sign in"])
def test_a_web_page_is_no_damaged_shard(page):
    with (
        Shaky(None, body=page) as server,
        pytest.raises(StorageError, match=r"/a\.tar: this is a web page, not a tar\."),
    ):
        list(Pipeline().stream(server.url).to_tuple("__key__").loader(workers=0))


def test_a_folder_of_a_web_server_ends_with_a_slash():
    with pytest.raises(StorageError, match="A folder of a web server ends with a slash"):
        Pipeline().exact("http://127.0.0.1:1/data").to_tuple("__key__").loader(workers=0)


def test_a_redirect_tells_the_other_host_nothing_of_the_first(monkeypatch):
    """It gets no query, and no password of a proxy that is not used for it."""
    with Shaky(None) as last, Shaky((302, {"Location": f"{last.url}?part=1", "Set-Cookie": "hush=1"})) as proxy:
        monkeypatch.setenv("http_proxy", f"http://user:hush@127.0.0.1:{proxy.server_port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert read_all("http://data.invalid/a.tar?sig=hush") == BODY
    assert "Proxy-Authorization" in {name.title() for name in proxy.headers[0]}
    assert {*last.paths} == {"/a.tar?part=1"}
    assert not any("hush" in str(headers) for headers in last.headers)


# From https to http.


@pytest.fixture
def trusting(monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(CA))


def safe(*script):
    server = Shaky(*script)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.scheme = "https"
    return server


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("query", ["", "?sig=hush"])
@pytest.mark.usefixtures("trusting")
def test_a_redirect_from_https_to_http_is_refused(status, query):
    with Shaky(None) as plain, safe((status, {"Location": plain.url})) as server:
        with pytest.raises(StorageError, match="its redirect is not followed: it leads from https to http"):
            open_stream(server.url + query)
        assert plain.asked == []


@pytest.mark.parametrize("query", ["", "?sig=hush"])
@pytest.mark.usefixtures("trusting")
def test_other_redirects_are_followed(query):
    with safe(None) as last, safe((302, {"Location": last.url})) as safe_one, Shaky((302, {})) as plain:
        plain.script = [(302, {"Location": safe_one.url})]
        assert read_all(safe_one.url + query) == read_all(plain.url + query) == BODY


@pytest.mark.parametrize("query", ["", "?sig=hush"])
def test_a_certificate_that_nobody_vouches_for_is_refused_at_once(query):
    with safe(None) as server, pytest.raises(StorageError, match="its TLS certificate is not trusted") as caught:
        open_stream(server.url + query)
    assert "tries" not in str(caught.value)
