"""A small HTTP server at which Prometheus asks for the counters of this process's loaders.

Loaders with the same address share one; it ends, with its thread and its sockets, when the last of them goes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer

from wdskit.errors import PipelineError
from wdskit.loader.prometheus import CONTENT_TYPE, metrics_text
from wdskit.loader.stats import Stats

logger = logging.getLogger(__name__)

Address = tuple[str, int]

_lock = threading.RLock()  # a loader may be collected, and taken from its server, while this thread adds another
_servers: dict[Address, _Server] = {}


def serve(stats: Stats, host: str, port: int) -> Callable[[], None]:
    """Let a loader's counters be asked for at `http://host:port/metrics`, until what is returned is called.

    Args:
        stats: Of the loader. Its name gets a number behind it where another loader there has it.
        host: Address to listen at.
        port: 0: any that is free; the log tells which.

    Raises:
        PipelineError: The port cannot be had.
    """
    with _lock:
        server = _servers.get((host, port))
        if server is None:
            server = _servers[host, port] = _Server(host, port)
        server.add(stats)

    def close() -> None:
        with _lock:
            if _servers.get((host, port)) is server and server.remove(stats):
                del _servers[host, port]
                server.close()

    return close


def ports() -> list[int]:
    """The ports at which this process listens."""
    return [server.port for server in _servers.values()]


class _Server:
    """One listening socket and the thread that answers."""

    def __init__(self, host: str, port: int) -> None:
        try:
            self._listener = _Listener((host, port), _Handler)
        except OSError as err:
            msg = f"stats: port {port} of {host} cannot be had: {err.strerror or err}."
            raise PipelineError(f"{msg}\n  Choose another for loader.stats.port, or leave it out.") from err
        self._wake, self._woken = socket.socketpair()
        self.port = int(self._listener.server_address[1])
        self._thread = threading.Thread(target=self._run, name="wdskit-metrics", daemon=True)
        self._thread.start()
        logger.info("metrics for Prometheus: http://%s:%d/metrics", host, self.port)

    def add(self, stats: Stats) -> None:
        """Note one more loader."""
        names = {each.name for each in self._listener.loaders}
        numbered = (f"{stats.name}-{number}" for number in range(2, len(names) + 2))
        stats.name = stats.name if stats.name not in names else next(name for name in numbered if name not in names)
        self._listener.loaders = [*self._listener.loaders, stats]

    def remove(self, stats: Stats) -> bool:
        """Note one loader less; whether that was the last."""
        self._listener.loaders = [each for each in self._listener.loaders if each is not stats]
        return not self._listener.loaders

    def close(self) -> None:
        """End the thread, which closes the sockets."""
        self._wake.close()
        if threading.current_thread() is not self._thread:  # it is where the garbage collector ran
            self._thread.join(2 * _Handler.timeout)

    def forget(self) -> None:
        """Close the copies of the sockets that a forked process has."""
        for each in (self._listener.socket, self._wake, self._woken):
            each.close()

    def _run(self) -> None:
        with self._listener, self._woken, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while self._woken not in {key.fileobj for key, _ in selector.select()}:
                self._listener.handle_request()


class _Listener(HTTPServer):
    timeout = 0  # it is asked for a request when one is there

    def __init__(self, address: Address, handler: type[BaseHTTPRequestHandler]) -> None:
        self.loaders: list[Stats] = []
        super().__init__(address, handler)
        self.socket.setblocking(False)  # a client that was there may have gone

    def server_bind(self) -> None:
        """Without looking up the host's name, as http.server does, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 (http.server's)
        """A client that breaks off is no news."""
        logger.debug("a request from %s failed", client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = 2  # seconds that a client may take for its request: the others wait meanwhile
    server: _Listener

    def do_GET(self) -> None:
        """All loaders' counters."""
        if self.path.partition("?")[0] not in {"/", "/metrics"}:
            self.send_error(404)
            return
        data = metrics_text(self.server.loaders).encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (http.server's)
        """A request every few seconds is no news."""
        logger.debug(format, *args)


def _forget_all() -> None:
    """In a forked process the threads are not there, and sockets that it kept open would keep the port."""
    global _lock  # noqa: PLW0603 (another thread of the parent may have held it)
    _lock = threading.RLock()
    for server in _servers.values():
        with contextlib.suppress(OSError):
            server.forget()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_all)
