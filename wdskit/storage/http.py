"""http(s) bodies as streams, with the standard library's client."""

from __future__ import annotations

import functools
import http
import http.client
import re
import ssl
import urllib.error
import urllib.request
from typing import IO
from urllib.parse import quote

from wdskit.errors import StorageError

TIMEOUT_S = 60.0
"""Longest wait for a connection or for the next bytes."""

_ASCII = bytes(range(128)).decode()
_HOST = re.compile(r"https?://[^/?#]*", re.IGNORECASE)


class HttpBody:
    """The body of one GET, read in order. A body shorter than its Content-Length is an error.

    Args:
        url: For messages.
        response: An open response with status 200.
    """

    def __init__(self, url: str, response: http.client.HTTPResponse) -> None:
        self.url = url
        self._response = response
        self._expected: int | None = response.length  # None where the body comes in chunks, which have an end marker
        self._num_bytes = 0

    def read(self, size: int) -> bytes:
        """Up to `size` bytes from where the last call stopped.

        Raises:
            StorageError: The connection failed, or closed before the promised length.
        """
        try:
            part = self._response.read1(size)
        except (OSError, http.client.HTTPException) as err:
            msg = f"{self.url}: reading failed after {self._num_bytes} bytes: {err}."
            raise StorageError(msg, url=self.url) from err
        self._num_bytes += len(part)
        if not part and self._expected is not None and self._num_bytes != self._expected:
            msg = f"{self.url}: the connection closed after {self._num_bytes} of {self._expected} bytes."
            raise StorageError(msg, url=self.url)
        return part

    def close(self) -> None:
        """Close the connection."""
        self._response.close()


class _HttpOnly(urllib.request.HTTPRedirectHandler):
    """Redirects to http(s) only; urllib would follow one to ftp too."""

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage
    ) -> object:
        """The response of the place that the redirect names."""
        try:
            return super().http_error_302(req, fp, code, msg, headers)
        except ValueError:  # the place is no URL
            fp.close()
            raise

    http_error_301 = http_error_303 = http_error_307 = http_error_302
    http_error_308 = http_error_302  # which Python 3.10 does not know

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """The request to go on with."""
        if not newurl.lower().startswith(("http://", "https://")):
            raise urllib.error.HTTPError(newurl, code, f"a redirect to {newurl}", headers, fp)
        known = http.HTTPStatus.TEMPORARY_REDIRECT if code == http.HTTPStatus.PERMANENT_REDIRECT else code
        return super().redirect_request(req, fp, known, msg, headers, newurl)


def open_http(url: str) -> HttpBody:
    """GET `url` and return its body.

    Characters beyond ASCII are sent as percent-encoded UTF-8. Proxies are those of the environment, as for curl:
    `http_proxy`, `https_proxy`, `no_proxy`.

    Raises:
        StorageError: No connection, a status other than 200, a body that was compressed on the way, or a URL with a
            password.
    """
    try:
        opener = urllib.request.build_opener(_HttpOnly, urllib.request.HTTPSHandler(context=_tls()))
        response = opener.open(_request(url), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as err:
        err.close()
        msg = f"{url}: the server answered {err.code} {err.reason}."
        raise StorageError(msg, url=url, status=err.code) from err
    except (OSError, http.client.HTTPException, ValueError) as err:
        msg = f"{url}: cannot be opened: {getattr(err, 'reason', err)}."
        raise StorageError(msg, url=url) from err
    if response.status != http.client.OK:
        response.close()
        msg = f"{url}: the server answered {response.status}, not 200."
        raise StorageError(msg, url=url, status=response.status)
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        response.close()
        msg = f"{url}: the server sends it compressed ({encoding}), though it was asked for the bytes as they are."
        raise StorageError(msg, url=url)
    return HttpBody(url, response)


@functools.cache
def _tls() -> ssl.SSLContext:
    """What TLS trusts: the system's certificates, read once (30 ms), where urllib does it for every body."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _request(url: str) -> urllib.request.Request:
    """A GET of `url`, which asks for the bytes as they are."""
    host = _HOST.match(url)
    if host and "@" in host[0]:  # urllib would ask the name server for all of it
        msg = f"{url}: a user or password in a URL is not supported. Name a URL that carries a token or signature."
        raise StorageError(msg, url=url)
    start = host.end() if host else 0
    address = url[:start] + quote(url[start:], safe=_ASCII)
    return urllib.request.Request(address, headers={"Accept-Encoding": "identity"})  # noqa: S310 (scheme is checked)
