"""An unreliable network for tests: a TCP proxy that delays, throttles and closes connections."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading


class UnreliableProxy:
    """Forwards connections from its own ports to other ports of this machine, unreliably.

    Args:
        routes: the target port of each of its ports.
        seed: the seed of the random faults.
        cut_after: the longest lifetime of a connection in seconds; the average is half of it.
        delay: the longest delay of a chunk in seconds.
        chunk: the number of bytes forwarded at a time.
    """

    def __init__(
        self, routes: dict[int, int], seed: int, cut_after: float = 2.0, delay: float = 0.01, chunk: int = 4096
    ) -> None:
        self.cuts = 0
        self._routes, self._rng = routes, random.Random(seed)
        self._cut_after, self._delay, self._chunk = cut_after, delay, chunk
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> UnreliableProxy:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *outcome: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        servers = [
            self._loop.run_until_complete(asyncio.start_server(self._handler(to), "127.0.0.1", port))
            for port, to in self._routes.items()
        ]
        self._ready.set()
        self._loop.run_forever()
        for server in servers:
            server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(asyncio.sleep(0.1))
        self._loop.close()

    def _handler(self, to: int):  # type: ignore[no-untyped-def]
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                target_reader, target_writer = await asyncio.open_connection("127.0.0.1", to)
            except OSError:
                writer.close()
                return
            pumps = [
                asyncio.ensure_future(self._pump(reader, target_writer)),
                asyncio.ensure_future(self._pump(target_reader, writer)),
            ]
            lifetime = self._rng.uniform(0, self._cut_after)
            done, _ = await asyncio.wait(pumps, timeout=lifetime, return_when=asyncio.FIRST_COMPLETED)
            self.cuts += not done
            for pump in pumps:
                pump.cancel()
            for each in (writer, target_writer):
                each.transport.abort()  # bytes in flight are lost

        return handle

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(self._chunk):
                await asyncio.sleep(self._rng.uniform(0, self._delay))
                writer.write(data)
                await writer.drain()
