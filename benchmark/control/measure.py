"""Measures the control messages of an update.

One process is the control server, another all ranks: bare connections that send what the channels of real ranks do, in
the same order, and wait for the same answers. Nothing is moved or computed, and requests reach engines in no time. What
is measured is what is left: the messages of an update for which nothing has changed.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections import Counter
from multiprocessing.connection import Connection

import msgspec
import psutil

from benchmark.control import words
from benchmark.control.bare_client import BareClient
from benchmark.control.words import Words
from benchmark.results import Row
from sglang_reshard.control import Address, ControlServer

ENGINE_RANKS = 8
WARMUPS, UPDATES = 2, 8


class Ranks:
    """All ranks of an update, each with a connection."""

    def __init__(self, trainer_ranks: int, engines: int, verify: bool) -> None:
        self._size, self._engines, self._verify = trainer_ranks, engines, verify
        self._trainers: list[BareClient] = []
        self._engine_ranks: list[BareClient] = []
        self.messages: Counter[str] = Counter()

    async def connect(self, address: Address) -> None:
        self._trainers = [await BareClient.connect(address) for _ in range(self._size)]
        self._engine_ranks = [await BareClient.connect(address) for _ in range(self._engines * ENGINE_RANKS)]

    async def update(self, number: int) -> float:
        """Returns the seconds of an update. What is said in it is prepared before."""
        trainers = [
            words.trainer_rank(number, rank, self._size, ENGINE_RANKS, self._verify) for rank in range(self._size)
        ]
        engines = [
            words.engine_rank(number, engine, rank, ENGINE_RANKS, self._verify)
            for engine in range(self._engines)
            for rank in range(ENGINE_RANKS)
        ]
        asking = words.asking(number, self._size, self._engines)
        reporting = words.reporting(number, self._engines, ENGINE_RANKS)
        self.messages = Counter(w.operation for said in (*trainers, *engines, asking, reporting) for w in said)
        started = time.perf_counter()
        await asyncio.gather(*map(_say, self._trainers, trainers), self._coordinate(asking, engines, reporting))
        return time.perf_counter() - started

    async def _coordinate(self, asking: Words, engines: list[Words], reporting: Words) -> None:
        await _say(self._trainers[0], asking)
        await asyncio.gather(*map(_say, self._engine_ranks, engines))
        await _say(self._trainers[0], reporting)

    def close(self) -> None:
        for client in (*self._trainers, *self._engine_ranks):
            client.close()


async def _say(client: BareClient, said: Words) -> None:
    for word in said:
        if word.posted:
            client.post(word.operation, *word.arguments)
        else:
            await client.call(word.operation, *word.arguments)


def _serve(link: Connection) -> None:
    server = ControlServer.open()
    link.send(msgspec.to_builtins(server.address))
    while link.recv() != "end":
        process = psutil.Process()
        link.send((sum(process.cpu_times()[:2]), process.memory_info().rss))
    server.close()


def measure(trainer_ranks: int, engines: int, verify: bool, updates: int = UPDATES) -> Row:
    """Seconds are of an update, from the first trainer rank's call to the last one's return.

    server_cpu_seconds   of the control server's process, in an update
    messages             requests to the control server in an update
    server_bytes_a_rank  by which the server's resident memory has grown after all updates, by the number of ranks
    """
    context = multiprocessing.get_context("forkserver")
    link, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    theirs.close()

    def now() -> tuple[float, int]:
        link.send("now")
        return link.recv()

    async def run() -> Row:
        address = msgspec.convert(link.recv(), Address)
        _, bytes_before = now()
        ranks = Ranks(trainer_ranks, engines, verify)
        await ranks.connect(address)
        for number in range(1, WARMUPS + 1):
            await ranks.update(number)
        cpu_before, _ = now()
        seconds = [await ranks.update(WARMUPS + number) for number in range(1, updates + 1)]
        cpu_after, bytes_after = now()
        ranks.close()
        return {
            "trainer_ranks": trainer_ranks,
            "engines": engines,
            "engine_ranks": ENGINE_RANKS,
            "verify": verify,
            "seconds_median": statistics.median(seconds),
            "seconds_max": max(seconds),
            "server_cpu_seconds": (cpu_after - cpu_before) / updates,
            "messages": ranks.messages.total(),
            "server_bytes_a_rank": (bytes_after - bytes_before) // (trainer_ranks + engines * ENGINE_RANKS),
        }

    try:
        return asyncio.run(run())
    finally:
        link.send("end")
        server.join(10)
        server.kill()
