"""The package's own control connections next to pyzmq with CURVE: `python -m benchmark.control_transports`.

Both carry the control messages of one warm update of 2 trainer ranks and an engine of 2 ranks, between a server process
and 5 threads that say what real ranks say, in turns. Both end at the same `SessionStore`. What pyzmq is spared here: a
check of the client's key (ZAP), timers, and any notice of the death of a peer, which its ROUTER does not give.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec
import zmq

from benchmark import results
from benchmark.control import words
from benchmark.control.words import Words
from sglang_reshard.control import Address, ControlClient, ControlServer, protocol
from sglang_reshard.control.connection import read_message, read_request
from sglang_reshard.control.server import MemoryQuota
from sglang_reshard.control.store import SessionStore, execute

PATH = results.FOLDER / "control_transports.json"
TRAINER_RANKS, ENGINE_RANKS, WARMUPS, UPDATES = 2, 2, 20, 300
_WAIT_S = 60.0


class OwnRank(ControlClient):
    """A rank's connection as it is."""

    def say(self, said: Words) -> None:
        for word in said:
            self._call(word.operation, *word.arguments, wait_s=_WAIT_S, wait=not word.posted)


class ZmqRank:
    """A rank's connection over a DEALER, whose thread hands replies to any number of waiting threads."""

    def __init__(self, port: int, server_key: bytes) -> None:
        own = f"inproc://{id(self)}"
        self._numbers, self._sending = itertools.count(1), threading.Lock()
        self._pending: dict[int, SimpleQueue[Any]] = {}
        self._dealer, self._outgoing, self._say = map(_socket, (zmq.DEALER, zmq.PULL, zmq.PUSH))
        self._dealer.curve_serverkey = server_key
        self._dealer.curve_publickey, self._dealer.curve_secretkey = zmq.curve_keypair()
        self._dealer.connect(f"tcp://127.0.0.1:{port}")
        self._outgoing.bind(own)
        self._say.connect(own)
        threading.Thread(target=self._run, daemon=True).start()

    def say(self, said: Words) -> None:
        for word in said:
            number = next(self._numbers)
            reply = self._pending[number] = SimpleQueue[Any]()
            request = (-number if word.posted else number, word.operation, word.arguments)
            with self._sending:  # a socket belongs to one thread at a time
                self._say.send(msgspec.msgpack.encode(request))
            if not word.posted:
                assert isinstance(reply.get(timeout=_WAIT_S), protocol.Result)

    def _run(self) -> None:
        while True:
            for end in zmq.select([self._dealer, self._outgoing], [], [])[0]:
                if end is self._outgoing:
                    self._dealer.send(self._outgoing.recv())
                elif not isinstance(message := read_message(self._dealer.recv()), protocol.Event):
                    self._pending.pop(message.number).put(message)


class _Peer(NamedTuple):
    router: zmq.Socket[bytes]
    rank: bytes

    def send(self, message: protocol.Reply | protocol.Event) -> None:
        self.router.send_multipart([self.rank, msgspec.msgpack.encode(message)])


def _socket(kind: int) -> zmq.Socket[bytes]:
    return zmq.Context.instance().socket(kind)


def serve_own(link: Connection) -> None:
    server = ControlServer.open()
    link.send(msgspec.to_builtins(server.address))
    threading.Event().wait()  # until the parent ends


def serve_zmq(link: Connection) -> None:
    router = _socket(zmq.ROUTER)
    public, router.curve_secretkey = zmq.curve_keypair()
    router.curve_server = True
    link.send((router.bind_to_random_port("tcp://127.0.0.1"), public))
    timers, ranks = asyncio.new_event_loop(), dict[bytes, _Peer]()  # it does not run: no wait times out
    store = SessionStore(MemoryQuota().take, timers.call_later)
    while True:
        rank, body = router.recv_multipart()
        number, name, arguments = read_request(body)
        execute(store, protocol.Call(ranks.setdefault(rank, _Peer(router, rank)), number), name, arguments)


def update(ranks: list[Any], threads: ThreadPoolExecutor, number: int) -> tuple[float, int, int]:
    """Returns seconds, number and bytes of the requests of an update; what is said is prepared before."""
    trainers = [words.trainer_rank(number, rank, TRAINER_RANKS, ENGINE_RANKS, False) for rank in range(TRAINER_RANKS)]
    engines = [words.engine_rank(number, 0, rank, ENGINE_RANKS, False) for rank in range(ENGINE_RANKS)]
    asking, reporting = words.asking(number, TRAINER_RANKS, 1), words.reporting(number, 1, ENGINE_RANKS)
    said = [*itertools.chain(*trainers, *engines, asking, reporting)]
    started = time.perf_counter()
    ranks[0].say(trainers[0][:2])  # it enters the update, and publishes its status, before it asks
    waiting = [threads.submit(ranks[0].say, trainers[0][2:]), threads.submit(ranks[1].say, trainers[1])]
    ranks[0].say(asking)
    list(threads.map(lambda rank, one: rank.say(one), ranks[TRAINER_RANKS:], engines))
    ranks[0].say(reporting)
    wait(waiting)
    seconds = time.perf_counter() - started
    return seconds, len(said), sum(len(msgspec.msgpack.encode(word)) for word in said)


def main() -> None:
    context, ranks = multiprocessing.get_context("forkserver"), dict[str, list[Any]]()
    for name, serve in (("own", serve_own), ("pyzmq, CURVE", serve_zmq)):
        link, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs,), daemon=True).start()
        said = link.recv()
        for _ in range(TRAINER_RANKS + ENGINE_RANKS):
            rank = ZmqRank(*said) if serve is serve_zmq else OwnRank(msgspec.convert(said, Address), _WAIT_S)
            ranks.setdefault(name, []).append(rank)
    seen: dict[str, list[tuple[float, int, int]]] = {name: [] for name in ranks}
    with ThreadPoolExecutor() as threads:
        for number, name in itertools.product(range(1, WARMUPS + UPDATES + 1), ranks):
            seen[name].append(update(ranks[name], threads, number))
    rows = []
    for name, all_of_them in seen.items():
        seconds, (_, messages, nbytes) = [one for one, _, _ in all_of_them[WARMUPS:]], all_of_them[-1]
        tenths = statistics.quantiles(seconds, n=10)
        times = dict(zip(("seconds_p10", "seconds_median", "seconds_p90"), tenths[::4], strict=True))
        rows.append({"transport": name, "updates": UPDATES, "messages": messages, "request_bytes": nbytes} | times)
    results.save(PATH, results.header("python -m benchmark.control_transports", [f"pyzmq {zmq.__version__}."]), rows)


if __name__ == "__main__":
    main()
