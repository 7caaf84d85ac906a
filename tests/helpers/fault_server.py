"""An HTTP server of ranges. The name of the requested file selects what goes wrong."""

from __future__ import annotations

import contextlib
import email.utils
import http.server
import inspect
import random
import re
import ssl
import threading
import time
from collections import Counter
from urllib.parse import parse_qs, unquote, urlsplit

BODY = random.Random(7).randbytes(3_000_000)
NEW_BODY = BODY[::-1]
DATE = "Sun, 06 Nov 1994 08:49:37 GMT"


class FaultServer(http.server.ThreadingHTTPServer):
    """Serves `BODY` under every name, with the fault of that name: a method of `Answer`.

    Attributes:
        requests: Path and headers of each request.
        rejects: `expired` refuses an Authorization that contains this text, and calls `on_reject`.
        most: Largest number of requests that were served at once.
    """

    daemon_threads = True

    def __init__(self, pem=None):
        super().__init__(("127.0.0.1", 0), Answer)
        self.requests, self.counts, self.rejects, self.on_reject = [], Counter(), "", lambda: None
        self.released, self.lock, self.serving, self.most, self.location = threading.Event(), threading.Lock(), 0, 0, ""
        self.url = f"http://127.0.0.1:{self.server_port}"
        if pem is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pem)
            self.socket = context.wrap_socket(self.socket, server_side=True)
            self.url = f"https://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.released.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        pass  # a client that gave up


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_GET(self):
        server = self.server
        path = unquote(self.path.partition("?")[0])
        prefix = parse_qs(urlsplit(self.path).query).get("prefix", [path])[0]
        self.name = prefix.rstrip("/").rpartition("/")[2].partition(".")[0]
        with server.lock:
            server.requests.append((self.path, dict(self.headers)))
            server.counts[self.name] += 1
            self.num = server.counts[self.name]
            server.serving += 1
            server.most = max(server.most, server.serving)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        self.start = int(asked[1]) if asked else 0
        self.stop = min(int(asked[2]) + 1, len(BODY)) if asked and asked[2] else len(BODY)
        with contextlib.suppress(OSError):
            getattr(self, self.name, self.ok)()
            self.wfile.flush()
        with server.lock:
            server.serving -= 1

    def give(self, status=206, body=None, *, source=BODY, num_sent=None, **headers):
        part = source[self.start : self.stop] if body is None else body
        known = {"ETag": '"one"', "Last-Modified": DATE, "Content-Length": str(len(part))}
        known["Content-Range"] = f"bytes {self.start}-{self.stop - 1}/{len(BODY)}"
        self.send_response(status)
        for name, value in (known | {name.replace("_", "-"): value for name, value in headers.items()}).items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(part[:num_sent])
        self.close_connection = num_sent is not None

    def refuse(self, status, code="", **headers):
        self.give(
            status,
            f"<Error><Code>{code}</Code><Message>{self.path} {self.headers}</Message></Error>".encode(),
            **headers,
        )

    def ok(self):
        if self.start >= len(BODY):
            self.refuse(416, "InvalidRange", Content_Range=None)
        else:
            self.give()

    def slow(self):
        time.sleep(0.02)
        self.give()

    def busy_3(self):
        self.refuse(503, "SlowDown", Retry_After="0") if self.num <= 3 else self.give()

    def busy_12(self):
        self.refuse(503, "SlowDown") if self.num <= 12 else self.give()

    def busy(self):
        self.refuse(503, "SlowDown")

    def busy_until(self):
        """Refuse two requests; Retry-After is the date when the server is free again."""
        if self.num <= 2:
            self.refuse(503, "SlowDown", Retry_After=email.utils.formatdate(time.time() + 1, usegmt=True))
        else:
            self.give()

    def broken(self):
        self.refuse(500)

    def too_many_2(self):
        self.refuse(429) if self.num <= 2 else self.give()

    def denied(self):
        self.refuse(403, "AccessDenied")

    def missing(self):
        self.refuse(404, "NoSuchKey")

    def gone(self):
        """Serve the first request; then the object is missing."""
        self.give() if self.num == 1 else self.missing()

    def reset(self):
        self.close_connection = True

    def reset_2(self):
        self.reset() if self.num <= 2 else self.give()

    def hang_up(self):
        """Close each connection after its reply, without a header that says so."""
        self.give()
        self.close_connection = True

    def http_1_0(self):
        self.protocol_version = "HTTP/1.0"
        self.give()
        self.close_connection = True

    def cut(self):
        """Break each reply after 1.2 MB."""
        self.give(num_sent=1_200_000 if self.stop - self.start > 1_200_000 else None)

    def cut_at_once(self):
        self.give(num_sent=0)

    def cut_anonymous(self):
        """Break the first reply, which names no version of the object."""
        self.give(num_sent=1000 if self.num == 1 else None, ETag=None, Last_Modified=None)

    def cut_weak(self):
        self.give(num_sent=1000 if self.num == 1 else None, ETag='W/"one"', Last_Modified=None)

    def stall(self):
        self.give(num_sent=1000)
        self.wfile.flush()
        self.server.released.wait(20)

    def stall_2(self):
        self.stall() if self.num <= 2 else self.give()

    def silence(self):
        self.server.released.wait(20)

    def drip(self):
        self.give(num_sent=0)
        while not self.server.released.wait(0.02):
            self.wfile.write(b"x")
            self.wfile.flush()

    def drip_headers(self):
        self.wfile.write(b"HTTP/1.1 206 Partial Content\r\n")
        while not self.server.released.wait(0.01):
            self.wfile.write(b"A: b\r\n")
            self.wfile.flush()

    def endless_headers(self):
        self.wfile.write(b"HTTP/1.1 206 Partial Content\r\n")
        while not self.server.released.is_set():
            self.wfile.write(b"A: b\r\n" * 100)

    def short(self):
        """Send at most 500,000 bytes, with their number as Content-Length."""
        self.give(body=BODY[self.start : self.stop][:500_000] if self.stop - self.start > 500_000 else None)

    def short_for_ever(self):
        self.give(body=b"")

    def long(self):
        self.give(Content_Length=str(self.stop - self.start + 100), num_sent=self.stop)

    def more(self):
        self.give(body=BODY[self.start : self.stop] + b"more")

    def endless(self):
        self.give(Content_Length=str(1 << 40), num_sent=self.stop)
        while not self.server.released.is_set():
            self.wfile.write(BODY)

    def without_length(self):
        self.give(Content_Length=None, num_sent=self.stop)

    def chunked(self):
        self.give(body=b"", Content_Length=None, Transfer_Encoding="chunked")
        part = BODY[self.start : self.stop]
        self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(part), part))

    def size_unknown(self):
        self.give(Content_Range=f"bytes {self.start}-{self.stop - 1}/*")

    def nothing(self):
        self.give(200, b"", Content_Range=None)

    def wrong_range(self):
        self.give(Content_Range=f"bytes {self.start + 1}-{self.stop}/{len(BODY)}")

    def other_range(self):
        self.start, self.stop = 0, 10
        self.give()

    def no_range(self):
        self.give(200, BODY, Content_Range=None)

    def gzip(self):
        self.give(Content_Encoding="gzip")

    def replaced(self):
        """Ignore If-Match, and serve another object from the second request on."""
        self.give() if self.num == 1 else self.give(source=NEW_BODY, ETag='"two"')

    def replaced_without_etag(self):
        date = DATE if self.num == 1 else DATE.replace("Sun, 06", "Mon, 07")
        self.give(source=BODY if self.num == 1 else NEW_BODY, ETag=None, Last_Modified=date)

    def replaced_once(self):
        """Serve another object to the third request, one of several that run at once."""
        self.give(source=NEW_BODY, ETag='"two"') if self.num == 3 else self.give()

    def weak(self):
        self.give(ETag='W/"one"')

    def weak_replaced(self):
        self.give(ETag='W/"one"') if self.num == 1 else self.give(source=NEW_BODY, ETag='W/"two"')

    def replaced_after_a_cut(self):
        self.give(num_sent=1_200_000) if self.num == 1 else self.give(source=NEW_BODY, ETag='"two"')

    def changed_after_a_cut(self):
        self.give(num_sent=1_200_000) if self.num == 1 else self.refuse(412)

    def grown_after_a_cut(self):
        size = len(BODY) + (self.num > 1)
        cut = 1_200_000 if self.num == 1 else None
        self.give(Content_Range=f"bytes {self.start}-{self.stop - 1}/{size}", num_sent=cut)

    def grown(self):
        size = len(BODY) + (self.num > 1)
        self.give(Content_Range=f"bytes {self.start}-{self.stop - 1}/{size}")

    def changed(self):
        """Refuse the second request with 412, as a server that knows If-Match."""
        self.give() if self.num == 1 else self.refuse(412)

    def anonymous(self):
        self.give(ETag=None, Last_Modified=None)

    def empty(self):
        headers = {"Content_Range": None}
        self.refuse(416, "InvalidRange", **headers) if "Range" in self.headers else self.give(200, b"", **headers)

    def moved(self):
        self.give(307, b"", Location=self.server.location, ETag=None, Content_Range=None)

    def round(self):
        self.give(307, b"", Location="/round", ETag=None, Content_Range=None)

    def expired(self):
        if self.server.rejects in self.headers.get("Authorization", ""):
            self.server.on_reject()
            self.refuse(400, "ExpiredToken")
        else:
            self.give()

    def page(self):
        self.give(200, b"\n<!DOCTYPE HTML>\n<title>Sign in</title>", Content_Range=None)

    def pages(self):
        """Send one of three pages of a list, selected by the token."""
        page = int(parse_qs(urlsplit(self.path).query).get("continuation-token", ["0"])[0])
        self.list([f"pages/{page}.tar"], str(page + 1) if page < 2 else "")

    def pages_for_ever(self):
        self.list(["pages_for_ever/0.tar"], "1")

    def pages_cut(self):
        self.list(["pages_cut/0.tar"], "", num_sent=150)

    def list(self, keys, token, *, num_sent=None):
        listed = "".join(
            f"<Contents><Key>{key}</Key><Size>3</Size><ETag>x</ETag>"
            "<LastModified>2020-01-01T00:00:00Z</LastModified></Contents>"
            for key in keys
        )
        more = "true" if token else "false"
        token = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
        text = f"<ListBucketResult><IsTruncated>{more}</IsTruncated>{listed}{token}</ListBucketResult>"
        self.give(200, text.encode()[:num_sent], Content_Range=None)

    def log_message(self, *_):
        pass


OTHERS = ("do_GET", "give", "refuse", "list", "page", "pages", "pages_for_ever", "pages_cut", "log_message")
FAULTS = [name for name, each in vars(Answer).items() if inspect.isfunction(each) and name not in OTHERS]
"""All names of objects, one for each fault; `ok` has none."""
