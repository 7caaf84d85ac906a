"""http(s) bodies as streams, with the standard library's client."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import IO

from wdskit.errors import StorageError

TIMEOUT_S = 60.0
"""Longest wait for a connection or for the next bytes."""


class HttpBody:
    """The body of one GET, read in order. A body shorter than its Content-Length is an error.

    Args:
        url: For messages.
        response: An open response with status 200.
    """

    def __init__(self, url: str, response: http.client.HTTPResponse) -> None:
        self.url = url
        self._response = response
        length = response.headers.get("Content-Length", "")
        self._expected = int(length) if length.isdigit() else None
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
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def open_http(url: str) -> HttpBody:
    """GET `url` and return its body.

    Raises:
        StorageError: No connection, or a status other than 200.
    """
    try:
        request = urllib.request.Request(url, headers={"Accept-Encoding": "identity"})  # noqa: S310 (scheme is checked)
        response = urllib.request.build_opener(_HttpOnly).open(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as err:
        err.close()
        msg = f"{url}: the server answered {err.code} {err.reason}."
        raise StorageError(msg, url=url) from err
    except (OSError, http.client.HTTPException, ValueError) as err:
        msg = f"{url}: cannot be opened: {getattr(err, 'reason', err)}."
        raise StorageError(msg, url=url) from err
    if response.status != http.client.OK:
        response.close()
        msg = f"{url}: the server answered {response.status}, not 200."
        raise StorageError(msg, url=url)
    return HttpBody(url, response)
