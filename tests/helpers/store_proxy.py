"""A proxy for a real store that lets some requests fail."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from typing_extensions import Self

DROP = 0
"""Value of `fail` that closes the connection without an answer."""


class StoreProxy(http.server.ThreadingHTTPServer):
    """Forwards every request to the store, unless `fail` lets it fail.

    Attributes:
        fail: Called with method and path of each request; returns a status, `DROP`, or None to forward the request.
        requests: Method and path of each request.
    """

    daemon_threads = True

    def __init__(self, endpoint: str) -> None:
        super().__init__(("127.0.0.1", 0), Forward)
        self.endpoint = urlsplit(endpoint)
        self.fail: Callable[[str, str], int | None] = lambda *_: None
        self.requests: list[tuple[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        pass  # a client that gave up


class Forward(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, StoreProxy)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server.requests.append((self.command, self.path))
        status = server.fail(self.command, self.path)
        if status == DROP:
            self.close_connection = True
            self.connection.close()
            return
        if status is not None:
            code = {503: "SlowDown", 403: "AccessDenied"}[status]
            self.answer(status, [], f"<Error><Code>{code}</Code></Error>".encode())
            return
        with contextlib.closing(http.client.HTTPConnection(server.endpoint.netloc, timeout=60)) as store:
            store.request(self.command, self.path, body, dict(self.headers))
            reply = store.getresponse()
            data = reply.read()
        length = reply.headers["Content-Length"] if self.command == "HEAD" else None
        headers = [(name, value) for name, value in reply.getheaders() if name not in ("Content-Length", "Date")]
        self.answer(reply.status, headers, data, length)

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET  # noqa: N815 (the names that the base class calls)

    def answer(self, status: int, headers: list[tuple[str, str]], data: bytes, length: str | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() != "transfer-encoding":
                self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass
