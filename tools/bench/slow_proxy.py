"""A TCP proxy on loopback that gives a server the latency of a cloud, and counts the bytes that it sends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

CHUNK_BYTES = 256 << 10
MAX_AHEAD = 64
"""Chunks in transit in one direction of a connection: 16 MB, enough for 0.5 GB/s at a delay of 30 ms."""


class SlowProxy:
    """A proxy that forwards each chunk `delay_s` later, in both directions, and does not limit the rate otherwise.

    Args:
        port: Port of the server on loopback.
        delay_s: Delay in one direction.

    Attributes:
        num_bytes: Bytes that the server has sent so far, headers included.
        url: Address of the proxy; empty until `run` starts it.
    """

    def __init__(self, port: int, delay_s: float) -> None:
        self.port, self.delay_s = port, delay_s
        self.num_bytes = 0
        self.url = ""

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Serve in a thread while the block runs."""
        began, loops = threading.Event(), list[asyncio.AbstractEventLoop]()
        stop = asyncio.Event()

        async def serve() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            loops.append(asyncio.get_running_loop())
            began.set()
            await stop.wait()
            server.close()

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        began.wait()
        try:
            yield
        finally:
            loops[0].call_soon_threadsafe(stop.set)
            thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            above, below = await asyncio.open_connection("127.0.0.1", self.port)
            await asyncio.gather(self._pass(reader, below), self._pass(above, writer, is_counted=True))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_counted: bool = False
    ) -> None:
        """Read chunks as they arrive, and write each chunk `delay_s` later."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_AHEAD)

        async def write() -> None:
            while (chunk := await chunks.get())[1]:
                await asyncio.sleep(chunk[0] - loop.time())
                if not writer.is_closing():
                    with contextlib.suppress(OSError):
                        writer.write(chunk[1])
                        await writer.drain()
            writer.close()

        writing = asyncio.ensure_future(write())
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if is_counted:
                    self.num_bytes += len(data)
                await chunks.put((loop.time() + self.delay_s, data))
        await chunks.put((0.0, b""))
        await writing
