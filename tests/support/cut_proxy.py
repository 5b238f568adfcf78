"""A proxy between processes on loopback that cuts the connections of chosen pairs, without closing them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LAUNCHER = """
import json, os, runpy
import zmq

routes, connect = json.loads(os.environ["ROUTES"]), zmq.Socket.connect
zmq.Socket.connect = lambda self, address: connect(self, routes.get(address, address))
runpy.run_module("cgd", run_name="__main__", alter_sys=True)
"""
"""A program like `python -m cgd` that connects to the addresses in ROUTES instead of those of the federation file."""


class CutProxy:
    """Forwards connections between participants, and holds back the bytes between those that are cut off.

    Args:
        ports: for each pair, the one that connects and the one that listens, the port of the proxy and the port of the
            latter.
    """

    def __init__(self, ports: Mapping[tuple[str, str], tuple[int, int]]) -> None:
        self._ports = ports
        self._cuts: frozenset[frozenset[str]] = frozenset()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> CutProxy:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *outcome: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def cut(self, *parts: Iterable[str]) -> None:
        """Let no bytes pass between these parts of the participants; without any, let all pass."""
        sets = [set(part) for part in parts]
        pairs = ((x, y) for one in sets for other in sets if one is not other for x in one for y in other)
        self._cuts = frozenset(map(frozenset, pairs))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        servers = [
            self._loop.run_until_complete(asyncio.start_server(self._handler(pair, inner), "127.0.0.1", outer))
            for pair, (outer, inner) in self._ports.items()
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

    def _handler(self, ends: tuple[str, str], port: int):  # type: ignore[no-untyped-def]
        pair = frozenset(ends)

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await self._until_passable(pair)
                target_reader, target_writer = await asyncio.open_connection("127.0.0.1", port)
            except (OSError, asyncio.CancelledError):
                writer.transport.abort()
                return
            pumps = [
                asyncio.ensure_future(self._pump(pair, reader, target_writer)),
                asyncio.ensure_future(self._pump(pair, target_reader, writer)),
            ]
            try:
                with contextlib.suppress(asyncio.CancelledError):  # the proxy ends
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                for each in (writer, target_writer):
                    each.transport.abort()

        return handle

    async def _pump(self, pair: frozenset[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._until_passable(pair)
                writer.write(data)
                await writer.drain()

    async def _until_passable(self, pair: frozenset[str]) -> None:
        while pair in self._cuts:
            await asyncio.sleep(0.05)
