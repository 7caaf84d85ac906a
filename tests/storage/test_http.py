"""http(s) bodies over a network that sometimes fails, from a real server on loopback."""

from __future__ import annotations

import email.utils
import http.server
import re
import ssl
import threading
import time
from dataclasses import dataclass

import pytest
from folders import GOLDEN
from shards import write_shard

from wdskit import Pipeline
from wdskit.errors import StorageError
from wdskit.storage import http as http_module
from wdskit.storage.urls import open_stream, read_bytes

BODY = bytes(range(256)) * 1000
PEM = GOLDEN / "loopback.pem"
"""A certificate for 127.0.0.1 with its key, which nothing else trusts."""


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

    def __init__(self, *script, etag='"one"', body=BODY, gives_parts=True, chunked=False):
        super().__init__(("127.0.0.1", 0), Answer)
        self.script, self.etag, self.body = list(script), etag, body
        self.gives_parts, self.chunked = gives_parts, chunked
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
        server.validators.append(self.headers.get("If-Range"))
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
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        is_same = self.headers.get("If-Range") == server.etag
        start = int(match[1]) if match and server.gives_parts and is_same else 0
        rest = server.body[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(server.body) - 1}/{len(server.body)}")
        if server.etag:
            self.send_header("ETag" if server.etag.startswith(('"', "W/")) else "Last-Modified", server.etag)
        if server.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        sent = rest if step is None else rest[:step]
        if server.chunked:
            self.wfile.write(b"%x\r\n%s" % (len(rest), sent) + (b"\r\n0\r\n\r\n" if step is None else b""))
        else:
            self.wfile.write(sent)

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """The times of waits, which are not really waited."""
    waited = []
    monkeypatch.setattr(http_module.time, "sleep", waited.append)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return waited


def read_all(url):
    return read_bytes(url, limit=1 << 30)


@pytest.mark.parametrize(
    "failure", [(503, {}), (500, {}), (502, {}), (504, {}), (429, {}), (408, {}), "nothing"], ids=str
)
def test_what_passes_is_tried_again_with_growing_waits(failure, waits):
    with Shaky(failure, failure, failure, failure, None) as server:
        assert read_all(server.url) == BODY
        assert waits == [0.5, 1, 2, 4]
    with Shaky(failure) as server:
        with pytest.raises(StorageError, match=r"\(5 tries\)") as caught:
            read_all(server.url)
        assert len(server.asked) == 5
        assert caught.value.status == (0 if failure == "nothing" else failure[0])


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 416])
def test_what_does_not_pass_is_asked_for_once(status, waits):
    with Shaky((status, {})) as server:
        with pytest.raises(StorageError, match=f"the server answered {status} [^(]*$"):
            read_all(server.url)
        assert (len(server.asked), waits) == (1, [])


def test_a_query_is_sent_and_stands_in_no_message():
    """The query may be a signature."""
    moved = (302, {"Location": "ftp://127.0.0.1/a.tar?sig=hush"})
    for script in [(403, {})], [(503, {})], ["nothing"], [1], [moved], [(200, {"Content-Encoding": "gzip"})]:
        with Shaky(*script, gives_parts=False) as server:
            with pytest.raises(StorageError) as caught:
                read_all(f"{server.url}?sig=hush")
            assert "hush" not in "".join(map(str, (caught.value, caught.value.url)))
            assert server.paths[0] == "/a.tar?sig=hush"
    with pytest.raises(StorageError) as caught:
        read_all("http://127.0.0.1:1/a b?sig=hush me")
    assert "hush" not in str(caught.value)


def test_nobody_who_listens_is_tried_again(waits):
    with Shaky(None) as server:
        url = server.url
    with pytest.raises(StorageError, match=r"cannot be opened: .*refused.* \(5 tries\)\.$"):
        read_all(url)
    assert len(waits) == 4


def test_the_server_says_how_long_to_wait(waits):
    with Shaky(
        (429, {"Retry-After": "7"}), (503, {"Retry-After": "0"}), (503, {"Retry-After": "soon"}), None
    ) as server:
        assert read_all(server.url) == BODY
    assert waits == [7, 0, 2]
    date = email.utils.formatdate(time.time() + 30, usegmt=True)
    with Shaky((503, {"Retry-After": date}), None) as server:
        assert read_all(server.url) == BODY
    assert 25 < waits[-1] <= 30
    with Shaky((429, {"Retry-After": "3600"})) as server:
        with pytest.raises(StorageError, match=r"answered 429 .*The server asks to wait for 3600 s"):
            read_all(server.url)
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        ("9" * 30, 86400),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 86400),
        ("Fri, 31 Dec 9999 23:59:59 -2359", 86400),
        ("Fri, 31 Dec 99999 23:59:59 GMT", None),
    ],
)
def test_a_wait_of_any_length_that_a_server_asks_for_is_a_finite_number(asked, seconds, waits):
    with Shaky((503, {"Retry-After": asked}), None) as server:
        if seconds is None:
            assert read_all(server.url) == BODY
            return
        with pytest.raises(StorageError, match=rf"The server asks to wait for {seconds} s\.$"):
            read_all(server.url)
        assert (len(server.asked), waits) == (1, [])


@pytest.mark.parametrize(
    ("asked", "wait_s"), [("-7", 0.5), ("Thu, 01 Jan 1970 00:00:00 GMT", 0), ("Mon, 01 Jan 0001 00:00:00 +2359", 0)]
)
def test_a_wait_is_never_negative(asked, wait_s, waits):
    with Shaky((503, {"Retry-After": asked}), None) as server:
        assert read_all(server.url) == BODY
    assert waits == [wait_s]


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "slow",
    [
        Endless(OK + b"Content-Length: 9999\r\n\r\n", b"x", 0.01),
        Endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", 0.01),
        Endless(OK, b"X", 0.01),
        Endless(OK, b"A: b\r\n", 0.01),
        Endless(b"", b"H", 0.01),
    ],
    ids=["body", "chunks", "header", "headers", "status"],
)
def test_a_server_that_sends_a_byte_now_and_then_is_an_error(slow, monkeypatch):
    monkeypatch.setattr(http_module, "RATE_S", 0.05)
    with Shaky(slow) as server, pytest.raises(StorageError, match=r"the server sent \d+ bytes in \d+ s"):
        read_all(server.url)


@pytest.mark.parametrize(
    "endless",
    [
        Endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
        Endless(OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n", b"A: b\r\n" * 100),
    ],
    ids=["continue", "trailers"],
)
def test_headers_without_end_are_an_error(endless):
    with Shaky(endless) as server, pytest.raises(StorageError, match="the server sent more than 262144 bytes of head"):
        read_all(server.url)


def test_the_body_of_a_redirect_is_not_read():
    with Shaky(None) as last:
        moved = f"HTTP/1.1 302 Found\r\nLocation: {last.url}\r\nContent-Length: {10**15}\r\n\r\n".encode()
        with Shaky(Endless(moved, b"x" * 1000)) as first:
            assert read_all(first.url) == BODY


def test_a_least_rate_leaves_time_to_whoever_reads(monkeypatch):
    """Only the time of reading counts: the training may take a minute for a batch."""
    monkeypatch.setattr(http_module, "RATE_S", 0.2)
    with Shaky(Endless(OK + b"\r\n", b"x", 0.01)) as server:
        body = http_module.HttpBody(server.url)
        for _ in range(4):
            assert body.read(1000)
            threading.Event().wait(0.1)
        body.close()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("etag", ['"one"', "Sun, 06 Nov 1994 08:49:37 GMT"])
def test_a_cut_body_goes_on_where_it_was_cut(etag, chunked):
    for cuts in ([1], [1000, 1], [len(BODY) - 1], [100_000, 100_000], [0, 0, 0, 0]):
        with Shaky(*cuts, None, etag=etag, chunked=chunked) as server:
            assert read_all(server.url) == BODY
            starts = [sum(cuts[:at]) for at in range(len(cuts) + 1)]
            assert server.asked == [f"bytes={start}-" if start else None for start in starts]
            assert server.validators == [etag if start else None for start in starts]


def test_tries_of_one_body_are_bounded():
    with Shaky(1) as server:
        with pytest.raises(StorageError, match=rf"closed after 5 of {len(BODY)} bytes \(5 tries\)"):
            read_all(server.url)
        assert len(server.asked) == 5


@pytest.mark.parametrize("etag", ["", 'W/"one"'])
def test_a_body_without_a_validator_is_not_pieced_together(etag):
    with Shaky(1000, None, etag=etag) as server:
        with pytest.raises(StorageError, match="closed after 1000 of"):
            read_all(server.url)
        assert len(server.asked) == 1


def test_bytes_of_two_files_are_never_one_body():
    def change(server):
        server.etag, server.body = '"two"', BODY[::-1]

    with Shaky(1000, change) as server, pytest.raises(StorageError, match=r"closed after 1000 .*the file has changed"):
        read_all(server.url)
    with (
        Shaky(1000, None, gives_parts=False) as server,
        pytest.raises(StorageError, match="the server does not support ranges"),
    ):
        read_all(server.url)


@pytest.mark.parametrize(
    "lie", [{"Content-Range": "bytes 999-5/6"}, {"Content-Range": "bytes 1000-1000/1001", "ETag": '"two"'}, {}]
)
def test_a_part_that_is_not_the_one_asked_for_is_refused(lie):
    with Shaky(1000, (206, lie)) as server, pytest.raises(StorageError, match="cannot continue from there"):
        read_all(server.url)


def test_a_stream_reads_through_cuts_and_refusals(tmp_path):
    samples = {f"k{number:03d}": {"txt": bytes(3000)} for number in range(100)}
    body = write_shard(tmp_path / "a.tar", samples).read_bytes()
    with Shaky((503, {}), 50_000, 100_000, (429, {"Retry-After": "1"}), None, body=body) as server:
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
    assert last.paths == ["/a.tar?part=1"]
    assert {name.title() for name in last.headers[0]} <= {"Accept-Encoding", "Connection", "Host", "User-Agent"}
    assert "hush" not in str(last.headers)


# From https to http.


@pytest.fixture
def trusting(monkeypatch):
    context = ssl.create_default_context(cafile=str(PEM))
    monkeypatch.setattr(http_module, "_tls", lambda: context)


def safe(*script):
    server = Shaky(*script)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.scheme = "https"
    return server


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_from_https_to_http_is_refused(trusting, status):
    with Shaky(None) as plain, safe((status, {"Location": plain.url})) as server:
        with pytest.raises(StorageError, match=f"the server answered {status} a redirect to http:"):
            open_stream(server.url)
        assert plain.asked == []


def test_other_redirects_are_followed(trusting):
    with safe(None) as last, safe((302, {"Location": last.url})) as safe_one, Shaky((302, {})) as plain:
        plain.script = [(302, {"Location": safe_one.url})]
        assert read_all(safe_one.url) == read_all(plain.url) == BODY
        safe_one.script = [(302, {"Location": plain.url})]
        with pytest.raises(StorageError, match="a redirect to http:"):  # first to https, then back to http
            read_all(plain.url)


def test_a_certificate_that_nobody_vouches_for_is_refused_at_once(waits):
    with safe(None) as server, pytest.raises(StorageError, match="CERTIFICATE_VERIFY_FAILED"):
        open_stream(server.url)
    assert waits == []
