"""Trainer ranks and engine ranks as processes, without SGLang, under a deadline.

Engine ranks run the real `WeightReceiver` on any model; trainer rank 0 reaches them over pipes, which
stand in for SGLang's way from the Engine to its schedulers.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq, decode, encode
from support.ready import CONTEXT

_TIMEOUT = timedelta(seconds=60)
_OTHERS_S = 2.0  # once one has failed: the cause may be another one's

Send = Callable[[DistributedUpdateWeightsReq], DistributedUpdateWeightsOutput]


@dataclass(frozen=True)
class Trainer:
    """What a trainer rank's function is given.

    send      reaches the engine from rank 0, and is None elsewhere
    send_one  reaches engine rank `i` alone: where each is an engine of its own. None elsewhere, too
    """

    rank: int
    size: int
    send: Send | None
    send_one: tuple[Send | None, ...]
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def group(self) -> dist.ProcessGroup:
        return dist.group.WORLD

    def sender(self, through: Callable[[Send], Send] = lambda send: send, **options: Any) -> WeightSender:
        """A sender to the engine, `through` what a test puts in between; closed when the function has returned."""
        send = None if self.send is None else through(self.send)
        sender = WeightSender.over(self.group, send, **{"timeout_s": 30, **options})
        self.opened.callback(sender.close)
        return sender


def run_world(
    trainers: int,
    engines: int,
    train: Callable[..., Any],
    serve: Callable[..., Any],
    *args: Any,
    deadline_s: float = 300.0,
    context: BaseContext = CONTEXT,
    engines_apart: bool = False,
    killed: Collection[str] = (),
) -> tuple[list[Any], list[Any]]:
    """Run `train(trainer, *args)` on every trainer rank and `serve(rank, size, requests, *args)` on every engine rank.

    `serve` iterates over `requests`, a `Requests`, and returns when it ends. Both results must be picklable.
    A process that fails, or all of them not ending within `deadline_s`, fails the test; none is left behind.

    context        how processes are started
    engines_apart  engine ranks are left without a default process group: SGLang makes one of its own
    killed         names of processes that end without a word, "engine rank 1"; their result is None
    """
    pipes = [context.Pipe() for _ in range(engines)]
    near = [a for a, _ in pipes]
    jobs = [(_trainer, (r, trainers, near if r == 0 else [None] * engines, train, args)) for r in range(trainers)]
    jobs += [(_engine, (r, engines, pipes[r][1], engines_apart, serve, args)) for r in range(engines)]
    results: list[Any] = [None] * len(jobs)
    processes, links = [], {}
    try:
        for i, (target, arguments) in enumerate(jobs):
            link, its_end = context.Pipe()
            process = context.Process(target=target, args=(its_end, *arguments), daemon=True)
            process.start()
            its_end.close()
            processes.append(process)
            links[link] = i
        for a, b in pipes:
            b.close()
            a.close()
        # Hosted here, so that they end last; and only now, as a fork beside a store's thread may hang.
        stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
        for link, i in links.items():
            link.send(stores[0 if i < trainers else 1].port)
        _collect(links, results, trainers, time.monotonic() + deadline_s, killed)
    finally:
        for process in processes:
            process.join(timeout=5 if process.exitcode is None else 0)
            if process.is_alive():
                process.kill()
                process.join()
    return results[:trainers], results[trainers:]


def _collect(
    links: dict[Connection, int], results: list[Any], trainers: int, end: float, killed: Collection[str]
) -> None:
    def name(i: int) -> str:
        return f"trainer rank {i}" if i < trainers else f"engine rank {i - trainers}"

    failed: list[str] = []
    while links:
        ready = wait(list(links), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for link in ready:
            i = links.pop(link)  # type: ignore[call-overload]
            try:
                ok, value = link.recv()  # type: ignore[union-attr]
                if name(i) in killed:
                    ok, value = False, f"lived, and was to be killed: {value}"
            except (EOFError, ConnectionResetError):
                ok, value = (True, None) if name(i) in killed else (False, "ended without a word")
            if ok:
                results[i] = value
                continue
            failed.append(f"{name(i)} failed:\n{value}")
            end = min(end, time.monotonic() + _OTHERS_S)
    if failed:
        raise RuntimeError("\n".join(failed))
    if links:
        raise TimeoutError(f"still running at the deadline: {[name(i) for i in links.values()]}")


def _report(link: Connection, run: Callable[[int], Any]) -> None:
    """Run with the port of the store to join, which comes over `link`; send the result back."""
    try:
        link.send((True, run(link.recv())))
    except BaseException:
        link.send((False, traceback.format_exc()))


def _join(rank: int, size: int, port: int, apart: bool = False) -> Any:
    """The group of these ranks; the default one, unless `apart`."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if apart:
        return dist.ProcessGroupGloo(store, rank, size, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    return dist.group.WORLD


def to_all(sends: Sequence[Send | None]) -> Send | None:
    """Reaches all ranks of an engine, which answer alike; None where nobody reaches them."""
    if None in sends:
        return None

    def send(request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
        with ThreadPoolExecutor(len(sends)) as threads:  # engine ranks answer together
            outputs = list(threads.map(lambda one: one(request), sends))  # type: ignore[misc]
        assert all(o == outputs[0] for o in outputs), f"engine ranks answered differently: {outputs}"
        return outputs[0]

    return send


def _trainer(link: Connection, rank: int, size: int, engines: list[Connection | None], train: Any, args: Any) -> None:
    def reach(engine: Connection) -> Send:
        def send(request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
            engine.send_bytes(encode(request))
            return decode(engine.recv_bytes(), DistributedUpdateWeightsOutput)

        return send

    sends = tuple(None if engine is None else reach(engine) for engine in engines)

    def run(port: int) -> Any:
        _join(rank, size, port)
        try:
            trainer = Trainer(rank, size, to_all(sends) if rank == 0 else None, sends)
            found = train(trainer, *args)
            trainer.opened.close()
            return found
        finally:
            for engine in filter(None, engines):
                with contextlib.suppress(BrokenPipeError):  # one that takes no more requests may have ended
                    engine.send_bytes(b"")  # the end of the requests

    _report(link, run)


class Requests:
    """The requests that reach an engine rank; `answer` each of them. `group` connects the engine ranks."""

    def __init__(self, pipe: Connection, group: Any) -> None:
        self._pipe, self.group = pipe, group

    def __iter__(self) -> Requests:
        return self

    def __next__(self) -> DistributedUpdateWeightsReq:
        data = self._pipe.recv_bytes()
        if not data:
            raise StopIteration
        return decode(data, DistributedUpdateWeightsReq)

    def answer(self, output: DistributedUpdateWeightsOutput) -> None:
        self._pipe.send_bytes(encode(output))


def _engine(link: Connection, rank: int, size: int, pipe: Connection, apart: bool, serve: Any, args: Any) -> None:
    def run(port: int) -> Any:
        return serve(rank, size, Requests(pipe, _join(rank, size, port, apart)), *args)

    _report(link, run)
