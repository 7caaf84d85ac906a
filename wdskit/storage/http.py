"""Read http(s) bodies as streams, with the standard library's client."""

from __future__ import annotations

import email.utils
import functools
import http
import http.client
import io
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message
from typing import Any
from urllib.parse import quote

from wdskit.errors import StorageError
from wdskit.limits import MAX_HTTP_HEADER_BYTES
from wdskit.text import hide_secrets, printable, public_url

TIMEOUT_S = 60.0
"""Longest wait for a connection or for the next bytes."""
TRIES = 5
"""Most GETs for one body, including GETs that resume it."""
WAIT_S = 0.5
"""Wait before the second GET. The wait doubles for each further GET."""
MAX_WAIT_S = 60.0
"""Longest wait that a server may ask for with Retry-After."""
MAX_ASKED_S = 86400
"""A longer Retry-After counts as one day: a server may send any number."""
RATE_S = 60.0
"""Time in which `RATE_BYTES` must arrive. The time between two reads does not count."""
RATE_BYTES = 1024
"""A server that sends fewer bytes in `RATE_S` counts as failed: `TIMEOUT_S` alone would allow one byte a minute."""

_PHRASES = {status.value: f" {status.phrase}" for status in http.HTTPStatus}
_HOST = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
_PAGE = re.compile(rb"\s*<(!doctype|html)\b", re.IGNORECASE)


class HttpBody:
    """The body of an http(s) GET, read in order. Creating the object sends the GET. Call `close` when done.

    After a temporary failure (no connection, 408, 429, 5xx, a cut body, fewer than `RATE_BYTES` in `RATE_S`) the GET is
    repeated, with at most `TRIES` GETs in total. After a cut body, only the missing bytes are requested. The ETag or
    Last-Modified must show that the file has not changed.

    Args:
        url: The URL to read. Characters beyond ASCII are sent as percent-encoded UTF-8. Proxies are those of the
            environment, as for curl: `http_proxy`, `https_proxy`, `no_proxy`.

    Attributes:
        url: The URL for messages, without the query, which may have a signature.

    Raises:
        StorageError: The last try failed, or the server asks to wait for more than `MAX_WAIT_S`. Or, without a
            further try: another status than 200 (not temporary), a TLS certificate that is not trusted, a compressed
            body, a redirect from https to http or to another scheme, an invalid URL, or one with a user or password.
    """

    def __init__(self, url: str) -> None:
        self.url = public_url(url)
        self._full_url = url
        self._num_bytes = 0
        self._num_tries = 1
        self._start()

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes from where the last call stopped; empty only at the end.

        Raises:
            StorageError: The body was cut and cannot be continued, for example because the file has changed. Or the
                body is a web page instead of a tar, such as the list of a folder or a sign-in.
        """
        while True:
            try:
                part = self._response.read1(size)
            except (OSError, http.client.HTTPException) as err:
                self._resume(f"{self.url}: reading failed after {self._num_bytes} bytes: {err}", err)
                continue
            if not self._num_bytes and _PAGE.match(part):
                self.close()
                msg = f"{self.url}: this is a web page, not a tar."
                way = "Name the shards. A folder of a web server needs an index, and a slash at the end of its URL"
                raise StorageError(f"{msg}\n  {way}.", url=self.url)
            self._num_bytes += len(part)
            if part or self._expected is None or self._num_bytes == self._expected:
                return part
            self._resume(f"{self.url}: the connection closed after {self._num_bytes} of {self._expected} bytes", None)

    @property
    def num_bytes(self) -> int | None:
        """Size of the body in bytes; None if the server does not send it."""
        return self._expected

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        self._response.close()

    def _start(self) -> None:
        self._response = self._open({})
        self._expected: int | None = self._response.length  # None for chunked bodies, which have an end marker
        self._validator = _validator(self._response.headers)

    def _open(self, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """Return the response to a GET. Repeat the GET after temporary failures.

        Raises StorageError if a GET failed and would fail again, if no try is left, or if the server asks to wait for
        more than `MAX_WAIT_S`.
        """
        while True:
            try:
                return _get(self._full_url, headers)
            except _TransientError as err:
                self._wait(str(err), err, err.after_s, err.status)

    def _wait(self, problem: str, cause: BaseException | None, after_s: float | None = None, status: int = 0) -> None:
        """Sleep before the next GET, and count the next GET as a try. The wait is `after_s` seconds. If `after_s` is
        None, the wait is `WAIT_S` before the second GET, and twice as long before each further GET.

        Raises StorageError if no try is left, or if the wait would be longer than `MAX_WAIT_S`. The error has
        `problem`, `status` and `cause`, which say why the last GET failed.
        """
        wait_s = WAIT_S * 2 ** (self._num_tries - 1) if after_s is None else after_s
        if self._num_tries >= TRIES or wait_s > MAX_WAIT_S:
            asked = f" The server asks to wait for {wait_s:.0f} s." if wait_s > MAX_WAIT_S else ""
            tries = f" ({self._num_tries} tries)" if self._num_tries > 1 else ""
            raise StorageError(f"{problem}{tries}.{asked}", url=self.url, status=status) from cause
        self._num_tries += 1
        time.sleep(wait_s)

    def _resume(self, problem: str, cause: BaseException | None) -> None:
        """Wait, and then request the bytes that have not been received. `problem` and `cause` say why reading stopped.

        Raises StorageError with `problem` if no try is left, the server cannot send only the missing bytes, or the file
        has changed. If the new GET itself fails, the StorageError describes the failure of the GET.
        """
        self._response.close()
        if self._num_bytes and self._validator is None:
            raise StorageError(f"{problem}.", url=self.url) from cause
        self._wait(problem, cause)
        if self._validator is None or not self._num_bytes:
            self._start()
            return
        self._response = self._open({"Range": f"bytes={self._num_bytes}-", "If-Range": self._validator})
        headers, length = self._response.headers, self._response.length
        if (
            self._response.status != http.HTTPStatus.PARTIAL_CONTENT
            or not headers.get("Content-Range", "").strip().startswith(f"bytes {self._num_bytes}-")
            or (None not in (self._expected, length) and self._num_bytes + (length or 0) != self._expected)
            or _validator(headers) not in (None, self._validator)
        ):
            self._response.close()
            why = "the file has changed, or the server does not support ranges"
            raise StorageError(f"{problem}, and the server cannot continue from there: {why}.", url=self.url) from cause


class _TransientError(Exception):
    """A GET failed, but may succeed later.

    Attributes:
        after_s: Seconds that the server asks to wait; None if it does not ask.
        status: Status of the response; 0 without a response.
    """

    def __init__(self, message: str, *, after_s: float | None = None, status: int = 0) -> None:
        super().__init__(message)
        self.after_s = after_s
        self.status = status


def _validator(headers: Message) -> str | None:
    """Return the strong ETag of a response, else its Last-Modified, to compare versions; None without both."""
    etag: str = headers.get("ETag", "")
    return etag if etag.startswith('"') else headers.get("Last-Modified")


def _retry_after(headers: Message) -> float | None:
    """Return the seconds that Retry-After asks to wait, at most one day; None if it is missing or invalid."""
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal() and text.isascii():
        return float(min(int(text[:12]), MAX_ASKED_S))
    try:
        after_s = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(0.0, after_s), float(MAX_ASKED_S))


class _BoundedSocket(io.RawIOBase):
    """The file of a socket. A read raises TimeoutError if the server sends fewer than `RATE_BYTES` in `RATE_S`, and
    http.client.HTTPException if the server sends more than `left` bytes.

    Args:
        sock: The unbuffered file of a socket.

    Attributes:
        left: Bytes that the server may still send; at first `MAX_HTTP_HEADER_BYTES`. `_Response` sets this number
            before each read of the body.
    """

    def __init__(self, sock: io.RawIOBase) -> None:
        self._sock = sock
        self._num_bytes = 0
        self._spent_s = 0.0
        self.left = MAX_HTTP_HEADER_BYTES

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read bytes into `buffer`. Return their number; 0 at the end.

        Raises:
            TimeoutError: The server is too slow.
            http.client.HTTPException: The server sent more than `left` bytes.
        """
        start = time.monotonic()
        num_bytes = self._sock.readinto(buffer)
        self._spent_s += time.monotonic() - start
        self._num_bytes += num_bytes or 0
        self.left -= num_bytes or 0
        if self.left < 0:
            raise http.client.HTTPException(f"the server sent more than {MAX_HTTP_HEADER_BYTES} bytes of headers")
        if self._spent_s >= RATE_S:
            if self._num_bytes < RATE_BYTES and num_bytes:
                raise TimeoutError(f"the server sent {self._num_bytes} bytes in {self._spent_s:.0f} s")
            self._num_bytes, self._spent_s = 0, 0.0
        return num_bytes

    def close(self) -> None:
        """Close the file of the socket."""
        self._sock.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response whose bytes come through `_BoundedSocket`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._socket = _BoundedSocket(self.fp.detach())
        self.fp = io.BufferedReader(self._socket)

    def read1(self, n: int = -1) -> bytes:
        """Return up to `n` bytes of the body, as `HTTPResponse.read1` does.

        During each call, the server may send only about `n` bytes, and the headers or trailers of one chunk. Raises
        http.client.HTTPException if the server sends more.
        """
        self._socket.left = n + io.DEFAULT_BUFFER_SIZE + MAX_HTTP_HEADER_BYTES
        return super().read1(n)


class _Connection(http.client.HTTPConnection):
    response_class = _Response


class _SafeConnection(http.client.HTTPSConnection):
    response_class = _Response


class _Http(urllib.request.HTTPHandler):
    """urllib's handler of http URLs. Its responses are `_Response` objects."""

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Return the response to a request; urllib calls this method for each http URL."""
        return self.do_open(_Connection, req)


class _Https(urllib.request.HTTPSHandler):
    """urllib's handler of https URLs. Its responses are `_Response` objects."""

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Return the response to a request; urllib calls this method for each https URL."""
        return self.do_open(_SafeConnection, req, context=_tls())


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """urllib's handler of redirects, which allows only http(s), and never a redirect from https to http.

    The redirected request keeps only the headers Accept-Encoding, Range and If-Range.

    Attributes:
        last: Target of the last redirect; empty before the first redirect.
    """

    last = ""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        """Follow a redirect and return the response; None if the redirect has no Location header.

        Raises ValueError if the Location header is not a URL, and StorageError if the redirect is not allowed.
        """
        try:
            return super().http_error_302(req, fp, code, msg, headers)
        except ValueError:  # the Location header is not a URL
            fp.close()
            raise

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302  # 3.10 does not know 308

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """Return the request to `newurl`, and store this URL in `last`. Close `fp`, the body of the redirect.

        Raises StorageError if the redirect is not allowed.
        """
        is_safe = req.full_url.lower().startswith("https:")
        if not newurl.lower().startswith("https://" if is_safe else ("http://", "https://")):
            fp.close()
            shown, target = public_url(req.full_url), printable(hide_secrets(newurl.partition("?")[0]))
            raise StorageError(f"{shown}: the server answered {code} a redirect to {target}.", url=shown, status=code)
        fp.close()  # urllib would read the body of the redirect, which may be endless
        known = http.HTTPStatus.TEMPORARY_REDIRECT if code == http.HTTPStatus.PERMANENT_REDIRECT else code
        request = super().redirect_request(req, fp, known, msg, headers, newurl)
        if request is not None:
            self.last = newurl.partition("#")[0]
            # urllib would send the password of a proxy to a server that is reached without the proxy.
            request.headers = {name: text for name, text in request.headers.items() if name.lower() in _OWN_HEADERS}
        return request


_OWN_HEADERS = ("accept-encoding", "range", "if-range")


def _get(url: str, headers: Mapping[str, str], redirects: _SafeRedirects | None = None) -> http.client.HTTPResponse:
    """Send one GET and return the response. Its status is 200; with `headers`, its status may also be 206.

    Args:
        url: The URL to read.
        headers: Headers of the request.
        redirects: The handler of redirects, if the caller needs its `last`; None uses a new handler.

    Raises:
        _TransientError: The request failed, and may succeed later.
        StorageError: The request failed, and would fail again.
    """
    shown = public_url(url)
    host = _HOST.match(url)
    if host and "@" in host[0]:  # urllib would send user and password to the name server
        msg = f"{shown}: a user or password in a URL is not supported. Name a URL that carries a token or signature."
        raise StorageError(msg, url=shown)
    start = host.end() if host else 0
    try:
        address = url[:start] + quote(url[start:], safe=bytes(range(128)))
        request = urllib.request.Request(address, headers={"Accept-Encoding": "identity", **headers})  # noqa: S310
        opener = urllib.request.build_opener(redirects or _SafeRedirects, _Http, _Https(context=_tls()))
        response: http.client.HTTPResponse = opener.open(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as err:
        err.close()
        # The server's own reason phrase may repeat the URL or have control characters.
        err.msg = phrase = _PHRASES.get(err.code, "")
        problem = f"{shown}: the server answered {err.code}{phrase}"
        if err.code in (408, 429) or err.code >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
            raise _TransientError(problem, after_s=_retry_after(err.headers), status=err.code) from err
        raise StorageError(f"{problem}.", url=shown, status=err.code) from err
    except (OSError, http.client.HTTPException, ValueError) as err:
        reason = getattr(err, "reason", err)
        problem = f"{shown}: cannot be opened: {str(reason).replace(url[len(shown) :], '')}"
        if isinstance(reason, (OSError, http.client.RemoteDisconnected)) and not isinstance(reason, ssl.SSLError):
            raise _TransientError(problem) from err
        raise StorageError(f"{problem}.", url=shown) from err
    encoding = response.headers.get("Content-Encoding", "identity").strip()
    if response.status != http.HTTPStatus.OK and not (headers and response.status == http.HTTPStatus.PARTIAL_CONTENT):
        msg = f"{shown}: the server answered {response.status}, not 200."
    elif encoding.lower() not in ("", "identity"):
        msg = f"{shown}: the server sends it compressed ({encoding}), although the request excludes that."
    else:
        return response
    response.close()
    raise StorageError(msg, url=shown, status=response.status)


def resolve_redirects(url: str) -> str:
    """Return the URL to which the redirects of `url` lead. Without a redirect, return `url`, percent-encoded.

    If a server refuses the request, or a redirect is not allowed, return the last URL that was requested: the next read
    reports the refusal.

    Raises:
        StorageError: In all `TRIES` tries, the server did not answer, or answered 408, 429 or 5xx.
    """
    url = quote(url, safe=bytes(range(33, 127)))
    for num_tries in range(1, TRIES + 1):
        redirects = _SafeRedirects()
        try:
            _get(url, {"Range": "bytes=0-0"}, redirects).close()
        except StorageError:
            break
        except _TransientError as err:
            if num_tries == TRIES:
                msg = f"{err} ({TRIES} tries)."
                raise StorageError(msg, url=public_url(url), status=err.status) from err
            time.sleep(WAIT_S * 2 ** (num_tries - 1))
        else:
            break
    return redirects.last or url


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return the TLS context, which is made at the first call."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
