"""Send requests to stores with one event loop, a limit of requests in flight, and retries. `RetryState` decides whether
a failed request is repeated; `objects.ObjectFile` requests the bytes of an object with it.

obstore's own retries are off, since they would hide a server's 503 and try a bad certificate ten times. Its errors
contain whole URLs, names of headers and the server's reply, so messages never use the text of these errors.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import http.client
import operator
import os
import random
import re
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urljoin

from wdskit.errors import StorageError
from wdskit.storage.stores import OBSTORE_ERRORS, READ_S, Location, is_metadata_failure, open_store
from wdskit.storage.traffic import NO_TRAFFIC, Traffic

MAX_IN_FLIGHT = 64
"""Largest number of units in flight. A small request takes one unit, a large request takes `LARGE_UNITS`."""
LARGE_UNITS = 8
RETRIES = 8
"""Retries of one part. A busy server gets more retries, because obstore does not show its Retry-After."""
RETRY_S = 120.0
"""Longest time of all waits between tries."""
WAIT_S = 0.1
"""Wait before the second try. The wait doubles for each further try, up to `MAX_WAIT_S`."""
MAX_WAIT_S = 15.0
MAX_REDIRECTS = 10
REDIRECT_S = 60.0
"""Longest time for one answer with a redirect: a server may send its headers slowly."""
END_S = 2.0
"""Longest wait for the cancelled requests when the process ends."""
LEAVE_S = 0.05
"""Wait for obstore's threads to leave Python when the process ends."""
MAX_STORES = 64
"""Most stores that stay open. Each signed URL has its own store."""

T = TypeVar("T")
_STATUS = re.compile(r"status code: (\d{3})((?: [A-Z][A-Za-z-]*)*)")
_CODE = re.compile(r"<Code>(\w{1,80})</Code>")
_SYSTEM = re.compile(r'code: \d+,\s*kind: \w+,\s*message: "([^"]*)"')
_REASONS = {
    "RangeNotSupported": "the server does not support range requests",
    "UnexpectedRange": "the server sent a different range than the one requested",
    "Could not parse path": "the key has an empty part, or a part of dots only, which is not supported",
    r"source: Header \{\s*source: (\w+)|Parse(ContentRange)": "a header of the server's reply is missing or invalid",
    "InvalidListResponse": "the server's list of objects is cut or invalid",
    "(?i)certificate|UnknownIssuer|NotValidForName": "its TLS certificate is not trusted. Name your own CA in "
    "SSL_CERT_FILE or AWS_CA_BUNDLE",
    "kind: Redirect": "its redirect is not followed: it leads from https to http, or in a loop",
    r"(?s)HttpError \{.*Parse\(": "the server's reply is not valid HTTP, or its headers are too long",
}
"""Reasons that would be the same at the next try, by a pattern of obstore's error; the first one that fits counts."""
_EXPIRED = (
    "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken", "TokenRefreshRequired",
    "RequestExpired",
)  # fmt: skip
"""Error codes for expired or invalid credentials: the credential files may have newer ones."""
_BUSY = (429, 503)


class EventLoop:
    """Sends the requests of this process: an event loop in its own thread, with a limit of requests in flight.

    Attributes:
        limit: Largest number of units in flight. A small request takes one unit, a large request `LARGE_UNITS`. Each
            reply of a busy server halves the limit, but not below `LARGE_UNITS`. Each success increases the limit by
            one, up to `MAX_IN_FLIGHT`.
        stores: The open stores by scheme and root; the most recently opened store is last.
    """

    def __init__(self) -> None:
        self.limit = MAX_IN_FLIGHT
        self.stores: dict[tuple[str, str], OpenStore] = {}
        self._traffic = NO_TRAFFIC
        self._lock = threading.Lock()
        self._used = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wdskit-objects", daemon=True)
        self._thread.start()

    def count(self, traffic: Traffic) -> None:
        """Add `traffic` to the counts. Several threads may call this method."""
        with self._lock:
            self._traffic = Traffic(*map(operator.add, self._traffic, traffic))

    def take_count(self) -> Traffic:
        """Return the counts since the last call of this method (at the first call, since the start)."""
        with self._lock:
            found, self._traffic = self._traffic, NO_TRAFFIC
        return found

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on this loop, from any other thread. Return the future of its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def end(self) -> None:
        """Cancel all requests, wait up to `END_S` seconds for their end, and stop the loop and its thread."""
        with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):
            self.submit(_cancel_all()).result(END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        time.sleep(LEAVE_S)  # a thread of obstore that enters Python at the interpreter's end aborts the process

    @contextlib.asynccontextmanager
    async def slot(self, units: int) -> AsyncIterator[None]:
        """Wait until the limit allows `units` more units in flight, and hold these units during the block.

        Earlier calls go first. If nothing is in flight, any number of units is allowed.
        """
        turn = self._loop.create_future()
        self._waiting.append((turn, units))
        self._grant()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._used -= units
            turn.cancel()
            self._grant()

    def _grant(self) -> None:
        while self._waiting and (not self._used or self._used + self._waiting[0][1] <= self.limit):
            turn, units = self._waiting.popleft()
            if not turn.done():
                self._used += units
                turn.set_result(None)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class OpenStore(NamedTuple):
    """A store of obstore. If `is_anonymous`, requests are unsigned, because no credentials were found."""

    store: Any
    is_anonymous: bool


class RetryState:
    """Decides whether and when a failed request is tried again. For use on the event loop only.

    Args:
        location: The object of the request.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._key = (location.scheme, location.root)
        self._loop = loop_of_this_process(location.url)
        self._used = OpenStore(None, is_anonymous=False)
        self._start = time.monotonic()
        self._num = 0
        self._waited_s = 0.0
        self._is_renewed = False

    def store(self) -> Any:
        """Return obstore's store for the next try. Raises StorageError if the store cannot be opened."""
        self._used = self._loop.stores.get(self._key) or self._open(anonymous=False)
        return self._used.store

    def succeeded(self) -> None:
        """Note a success: increase the limit of units in flight by one, up to `MAX_IN_FLIGHT`."""
        self._loop.limit = min(MAX_IN_FLIGHT, self._loop.limit + 1)

    async def failed(self, err: Exception) -> None:
        """Handle a failed try: sleep until the next try may start, and return.

        If new credentials may help, the store is opened again without a wait; if none were found, for unsigned
        requests. If the server is busy, the limit of units in flight is halved. `err` is one of `STORE_ERRORS`.

        Raises StorageError if another try would fail too, no try is left, or the store cannot be opened again.
        """
        failure = classify_error(err)
        has_none = is_metadata_failure(str(err)) and not self._used.is_anonymous
        if has_none or (failure.is_expired and not self._is_renewed):
            self._is_renewed = True
            if self._loop.stores.get(self._key) is self._used:  # no other request has reopened the store
                self._open(anonymous=has_none)
            return
        is_busy = failure.status in _BUSY
        if is_busy:
            self._loop.limit = max(LARGE_UNITS, self._loop.limit // 2)
        self._num += 1
        wait_s = min(MAX_WAIT_S, WAIT_S * 2 ** (self._num - 1)) * random.SystemRandom().uniform(0.75, 1.25)
        is_last = (self._num > RETRIES and not is_busy) or self._waited_s + wait_s > RETRY_S
        if is_last or not failure.is_transient:
            raise self._error(failure, time.monotonic() - self._start) from None
        self._loop.count(Traffic(retries=1))
        self._waited_s += wait_s
        await asyncio.sleep(wait_s)

    def _open(self, *, anonymous: bool) -> OpenStore:
        stores = self._loop.stores
        stores.pop(self._key, None)
        while len(stores) >= MAX_STORES:
            stores.pop(next(iter(stores)))
        stores[self._key] = opened = OpenStore(open_store(self._location, anonymous=anonymous), anonymous)
        return opened

    def _error(self, failure: RequestFailure, elapsed_s: float) -> StorageError:
        url, advice = self._location.url, ""
        if failure.status in (401, 403) and self._used.is_anonymous:
            self._loop.stores.pop(self._key, None)  # look for credentials again at the next read
            advice = "\n  No credentials were found, and it is not public."
        elif failure.status == 301 or (failure.reason.startswith(_NO_CONNECTION) and self._location.scheme == "s3"):
            advice = "\n  Check AWS_ENDPOINT_URL and AWS_REGION."
        tries = f" ({self._num} tries in {elapsed_s:.0f} s)" if self._num > 1 else ""
        return StorageError(f"{url}: {failure.reason}{tries}.{advice}", url=url, status=failure.status)


_NO_CONNECTION = "the connection failed"


class RequestFailure(NamedTuple):
    """Why a request failed.

    Attributes:
        reason: The problem, for messages, without secrets.
        status: Status of the HTTP response; 0 without a response.
        is_transient: Whether the request may succeed later.
        is_expired: Whether new credentials may help.
    """

    reason: str
    status: int = 0
    is_transient: bool = False
    is_expired: bool = False


class BrokenReplyError(Exception):
    """A reply has fewer bytes than requested, or a redirect could not be read. It may be right at the next try."""


STORE_ERRORS = (*OBSTORE_ERRORS, BrokenReplyError)
"""Errors of a try, which `RetryState.failed` handles."""


def classify_error(err: Exception) -> RequestFailure:
    """Return why a request failed. `err` is one of `STORE_ERRORS`. The result has no secrets."""
    text = str(err)
    if isinstance(err, BrokenReplyError):
        return RequestFailure(text, is_transient=True)
    if found := _STATUS.search(text):
        status = int(found[1])
        code = _CODE.search(text)
        reason = f"the server answered {status}{found[2]}" + (f" ({code[1]})" if code else "")
        is_expired = status == 401 or (code is not None and code[1] in _EXPIRED)
        if status == 412:
            reason = "the object was replaced while it was read"
        elif code is not None and code[1] == "NoSuchBucket":
            return RequestFailure("there is no such bucket")  # 404 would mean a missing file
        elif status == 404:
            reason = "there is no such object" + (f" ({code[1]})" if code else "")
        is_slow = code is not None and code[1] == "RequestTimeout"  # with status 400
        return RequestFailure(reason, status, status in (408, 429) or status >= 500 or is_slow, is_expired)
    for sign, reason in _REASONS.items():
        if found := re.search(sign, text):
            return RequestFailure(f"{reason} ({found[found.lastindex]})" if found.lastindex else reason)
    if "HttpError {" in text:
        kind = "no reply came in time" if "kind: Timeout" in text or "TimedOut" in text else _NO_CONNECTION
        system = _SYSTEM.search(text)
        return RequestFailure(kind + (f": {system[1]}" if system else ""), is_transient=True)
    return RequestFailure(f"it cannot be read: {type(err).__name__}. Check the settings of its store")


async def call_with_retries(location: Location, call: Callable[[Any], Awaitable[Any]], limit_s: float) -> Any:
    """Await `call` with the store of a location, with retries. Return its result.

    Args:
        location: The object.
        call: Takes obstore's store, and sends the request.
        limit_s: Longest time for one try.

    Raises:
        StorageError: A try took longer than `limit_s`, which is not tried again; or the last try failed.
    """
    tries = RetryState(location)
    while True:
        try:
            reply = await asyncio.wait_for(call(tries.store()), limit_s)
        except asyncio.TimeoutError as err:
            msg = f"{location.url}: the store did not answer within {limit_s:.0f} s."
            raise StorageError(msg, url=location.url) from err
        except STORE_ERRORS as err:
            await tries.failed(err)
        else:
            tries.succeeded()
            return reply


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Turns each redirect into an HTTPError."""

    def redirect_request(self, *_: object) -> None:
        """Follow no redirect."""


async def follow_redirects(location: Location, url: str) -> str:
    """Return the URL to which the redirects of `url`, an http(s) URL with a query, lead. If obstore refuses a redirect,
    return the URL before it. `location` is for messages and retries.

    Raises StorageError if a server does not answer, or stays busy, in all tries.
    """
    # If obstore followed redirects, it would send the query, which may be a signature, to other hosts, as Referer.
    for _ in range(MAX_REDIRECTS):

        async def ask(_: object, url: str = url) -> str:
            return await asyncio.to_thread(_next_url, url)

        target: str = await call_with_retries(location, ask, REDIRECT_S)
        if not target.lower().startswith("https://" if url.lower().startswith("https:") else ("http://", "https://")):
            break
        url = target
    return url


def _next_url(url: str) -> str:
    """Return the target of the redirect with which the server of `url` answers; "" if it answers without a redirect.

    Raises:
        BrokenReplyError: The server is busy, or cannot be reached.
        OSError: The server cannot be reached, which would fail again.
    """
    opener = urllib.request.build_opener(_NoRedirects)
    request = urllib.request.Request(url, headers={"Range": "bytes=0-1", "Accept-Encoding": "identity"})  # noqa: S310
    try:
        opener.open(request, timeout=READ_S).close()
    except urllib.error.HTTPError as err:
        err.close()
        if err.code in _BUSY or err.code >= 500:
            raise BrokenReplyError(f"the server answered {err.code}") from None
        target = err.headers.get("Location", "") if 300 < err.code < 400 else ""
        return urljoin(url, target).partition("#")[0] if target else ""
    except (OSError, http.client.HTTPException) as err:
        reason = getattr(err, "reason", err)
        if isinstance(reason, ssl.SSLError):
            raise OSError(str(reason)) from None
        raise BrokenReplyError(f"{_NO_CONNECTION}: {getattr(reason, 'strerror', None) or 'no reply'}") from None
    return ""


class _Process:
    """The state of this process: its event loop, and whether it was forked from a process with an event loop."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.event_loop: EventLoop | None = None
        self.was_forked = False
        self.is_ending = False

    def after_fork(self) -> None:
        """Prepare a forked child: replace the lock, and remember whether the parent had an event loop."""
        self.lock = threading.Lock()
        self.was_forked = self.was_forked or self.event_loop is not None

    def end(self) -> None:
        """End the event loop at exit. Later reads raise StorageError."""
        self.is_ending = True
        if self.event_loop is not None and not self.was_forked:
            self.event_loop.end()


_PROCESS = _Process()
os.register_at_fork(after_in_child=_PROCESS.after_fork)
atexit.register(_PROCESS.end)


def loop_of_this_process(url: str) -> EventLoop:
    """Return the event loop of this process. The first call starts the loop.

    Raises:
        StorageError: This process is ending, or was forked after its parent had read from a store. The message names
            `url`.
    """
    if _PROCESS.was_forked:
        msg = f"{url}: this process was forked after its parent had read from a store, so reading would hang."
        raise StorageError(f'{msg}\n  Start processes with the method "forkserver" or "spawn".', url=url)
    if _PROCESS.is_ending:
        raise StorageError(f"{url}: this process is ending and cannot read any more.", url=url)
    with _PROCESS.lock:
        if _PROCESS.event_loop is None:
            _PROCESS.event_loop = EventLoop()
        return _PROCESS.event_loop


def wait_for_result(future: Future[T], url: str) -> T:
    """Wait for a future, and return its result or raise its error. Raises StorageError if the future was cancelled.

    If Ctrl-C or another exception ends the wait, the future is cancelled. `url` is for the message.
    """
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        msg = f"{url}: the read was cancelled: the file was closed, or the process is ending."
        raise StorageError(msg, url=url) from None
    except BaseException:
        future.cancel()
        raise
