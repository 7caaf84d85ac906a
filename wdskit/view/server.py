"""The local web server of `wdskit view`.

The content of shards may be hostile. Text is sent to the page as JSON and becomes text there, never markup; images are
decoded here and encoded again; and the page's policy allows no script but `view.js`. A request without the token is
refused, so other pages in the same browser get no answer. A request that names another host is refused too, so that no
foreign host name can point to this server.
"""

from __future__ import annotations

import functools
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wdskit.codecs.images import make_mask_overlay, make_thumbnail
from wdskit.errors import ConfigError, DecodeError, StorageError, WdskitError
from wdskit.limits import MAX_SHOWN_PIXELS
from wdskit.shards.filters import Expression
from wdskit.shards.tally import NumberTally
from wdskit.text import printable
from wdskit.view.charts import bar_levels, make_histogram
from wdskit.view.describe import describe, summarize
from wdskit.view.samples import SampleView

HOST = "127.0.0.1"
MAX_PAGE = 200
MAX_SIDE = 2048
NUM_COUNTED = 2000
NUM_CLASSES = 30
SEARCH_S = 0.5
COUNT_S = 10.0

_MAX_CHARS = 4000  # of the text of a search
_ASSETS = {
    "": ("view.html", "text/html"),
    "view.js": ("view.js", "text/javascript"),
    "view.css": ("view.css", "text/css"),
    "view.svg": ("view.svg", "image/svg+xml"),
}
_HISTOGRAMS = {"width": "Width in pixels", "height": "Height in pixels", "bytes": "Bytes of a sample"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Guard:
    """An ASGI application that passes requests on to `app`, but refuses a wrong host or a wrong token in the path."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or answer with 403 if its host or its token is wrong.

        Security headers are added to the application's answers. Scopes other than http are passed on unchecked.
        """
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").partition(b":")[0]
        given = scope["path"].removeprefix("/").partition("/")[0].encode(errors="replace")
        if host not in {HOST.encode(), b"localhost"} or not secrets.compare_digest(given, self._token):
            refusal = PlainTextResponse("Open the address that `wdskit view` printed.\n", 403)
            return await refusal(scope, receive, send)

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        return await self._app(scope, receive, send_with_policy)


class Page:
    """Answers the requests of the page with JSON or an image. The methods run in threads.

    The methods raise ConfigError for a parameter out of range, SelectionError for an invalid filter, DecodeError for a
    missing or invalid image, and the errors of `SampleView.read`.
    """

    def __init__(self, samples: SampleView) -> None:
        self._samples = samples
        self._decoding = threading.Lock()  # one image at a time: several large images could fill the memory

    def routes(self) -> list[Route]:
        """Return the routes. Each one has the path of a kind of request, and the method that answers it."""
        by_path = {
            "/api/about": self.about,
            "/api/page": self.page,
            "/api/sample": self.sample,
            "/api/find": self.find,
            "/api/counts": self.counts,
            "/image": self.image,
            "/mask": self.mask,
        }
        return [Route(path, method) for path, method in by_path.items()]

    def about(self, _: Request) -> Response:
        """Answer with `title` and `num_samples`: the title of the samples and their number."""
        return JSONResponse({"title": printable(self._samples.title), "num_samples": len(self._samples)})

    def page(self, request: Request) -> Response:
        """Answer with a list of samples, each as `summarize` describes it.

        The query has one or more `row` (rows after the first 200 are ignored), or `start` (the first row) and `count`
        (1 to 200; default 24). Without both, the list is empty. For a sample that cannot be read, `problem` is the
        error, and all other values except `row` are empty.
        """
        rows = [self._row(text) for text in request.query_params.getlist("row")[:MAX_PAGE]]
        if not rows and "start" in request.query_params:
            start = self._row(request.query_params["start"])
            count = _number(request.query_params.get("count", "24"), 1, MAX_PAGE)
            rows = [*range(start, min(start + count, len(self._samples)))]
        return JSONResponse(
            [
                {
                    "row": row,
                    "key": "",
                    "class": "",
                    "image": None,
                    "masks": [],
                    "boxes": [],
                    "problem": printable(str(sample)),
                }
                if isinstance(sample, WdskitError)
                else summarize(sample)
                for row, sample in zip(rows, self._samples.read_each(rows), strict=True)
            ]
        )

    def sample(self, request: Request) -> Response:
        """Answer with all fields of the sample in the row `row` of the query, as `describe` returns them."""
        return JSONResponse(describe(self._samples.read(self._row(request.query_params.get("row", "")))))

    def find(self, request: Request) -> Response:
        """Search from the row `start` for at most `count` rows whose keys contain `text` and for which `filter` is
        true. Stop after about `SEARCH_S` seconds.

        The answer has the matching `rows`; `next`: the row where the search continues, or null at the end;
        `num_unanswered`: the number of rows that could not be checked; and `problem`: why the first of these rows
        could not be checked.
        """
        query = request.query_params
        text, condition = query.get("text", "")[:_MAX_CHARS], query.get("filter", "")
        found = self._samples.find(
            self._row(query.get("start", "0")),
            text=text,
            expression=Expression(condition) if condition.strip() else None,
            limit=_number(query.get("count", "24"), 1, MAX_PAGE),
            seconds=SEARCH_S,
        )
        return JSONResponse(
            {
                "rows": found.rows,
                "next": found.stop,
                "num_unanswered": found.num_unanswered,
                "problem": printable(found.problem),
            }
        )

    def counts(self, _: Request) -> Response:
        """Answer with charts of classes, image sizes and bytes, from at most 2,000 samples spread over all rows.

        Samples are read for at most about 10 s. The answer to later requests is the same.
        """
        return JSONResponse(self._counted)

    @functools.cached_property
    def _counted(self) -> dict[str, Any]:
        end = time.monotonic() + COUNT_S
        total = len(self._samples)
        num = min(total, NUM_COUNTED)
        classes: Counter[str] = Counter()
        numbers = {name: NumberTally() for name in _HISTOGRAMS}
        num_read = num_bad = 0
        places = np.random.default_rng(0).permutation(num).tolist()  # random, so that rows are spread if time ends
        for sample in self._samples.read_each([place * total // num for place in places]):
            num_read += 1
            if isinstance(sample, WdskitError):
                num_bad += 1
            else:
                card = summarize(sample)
                image = card["image"]
                classes[card["class"]] += 1
                numbers["bytes"].add(sum(map(len, sample.fields.values())))
                for name in ("width", "height") if image else ():
                    numbers[name].add(image[name])
            if time.monotonic() > end:
                break
        del classes[""]
        commonest = classes.most_common(NUM_CLASSES)
        levels = bar_levels(count for _, count in commonest)
        return {
            "num_read": num_read,
            "num_bad": num_bad,
            "num_samples": total,
            "num_classes": len(classes),
            "classes": [(name, count, level) for (name, count), level in zip(commonest, levels, strict=True)],
            "histograms": [
                vars(make_histogram(title, numbers[name].result()))
                for name, title in _HISTOGRAMS.items()
                if numbers[name].counts
            ],
        }

    def image(self, request: Request) -> Response:
        """Answer with an image as a JPEG of at most `side` x `side` pixels.

        The query has `row`, `field` (the name of the image's field) and `side` (default 256).
        """
        data, side = self._image(request)
        with self._decoding:
            picture, _ = make_thumbnail(data, side=side, max_pixels=MAX_SHOWN_PIXELS)
        return Response(picture, media_type="image/jpeg")

    def mask(self, request: Request) -> Response:
        """Answer with a mask as a coloured PNG of at most `side` x `side` pixels.

        The query has `row`, `field` (the name of the mask's field) and `side` (default 256).
        """
        data, side = self._image(request)
        with self._decoding:
            picture = make_mask_overlay(data, side=side, max_pixels=MAX_SHOWN_PIXELS)
        return Response(picture, media_type="image/png")

    def _image(self, request: Request) -> tuple[Any, int]:
        field = request.query_params.get("field", "")
        sample = self._samples.read(self._row(request.query_params.get("row", "")))
        data = next((data for name, data in sample.fields.items() if printable(name) == field), None)
        if data is None:
            raise DecodeError(f"there is no field {field!r} in this sample", field=field)
        return data, _number(request.query_params.get("side", "256"), 16, MAX_SIDE)

    def _row(self, text: str) -> int:
        return _number(text, 0, len(self._samples) - 1)


def _number(text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and least <= int(text) <= most):
        raise ConfigError(f"{text[:40]!r} is not a number of {least} to {most}.")
    return int(text)


def make_app(samples: SampleView, token: str) -> Guard:
    """Return the application that shows these samples. All its paths start with `/<token>/`.

    The answer to a request that causes a `WdskitError` has the status 422 and the message in `error`.
    """

    def asset(name: str, kind: str) -> Callable[[Request], Response]:
        data = resources.files("wdskit.view").joinpath(name).read_bytes()
        return lambda _: Response(data, media_type=kind)

    def refuse(_: Request, err: Exception) -> Response:
        return JSONResponse({"error": "\n".join(map(printable, str(err).split("\n")))}, 422)

    routes = [Route(f"/{path}", asset(*found)) for path, found in _ASSETS.items()]
    routes += Page(samples).routes()
    app = Starlette(routes=[Mount(f"/{token}", routes=routes)], exception_handlers={WdskitError: refuse})
    return Guard(app, token)


def serve(samples: SampleView, *, port: int, on_start: Callable[[str], None]) -> None:
    """Serve the page on 127.0.0.1 until Ctrl-C.

    Args:
        samples: The samples to show.
        port: Port number; 0 chooses a free port.
        on_start: Called with the address of the page before the first answer.

    Raises:
        StorageError: The port is in use, or this user may not open it.
    """
    token = secrets.token_urlsafe(24)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
        except OSError as err:
            raise StorageError(f"port {port}: {err.strerror}. Choose another with --port, or leave it out.") from err
        listening.listen()
        on_start(f"http://{HOST}:{listening.getsockname()[1]}/{token}/")
        config = uvicorn.Config(make_app(samples, token), log_level="warning", access_log=False, server_header=False)
        uvicorn.Server(config).run(sockets=[listening])
