"""Trainer ranks and engine ranks as processes, without SGLang, under a deadline.

Engine ranks run the real `WeightReceiver` on any model; trainer rank 0 reaches them over pipes, which
stand in for SGLang's way from the Engine to its schedulers.
"""

from __future__ import annotations

import multiprocessing as mp
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    decode,
    encode,
)

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed.tensor", "torch._dynamo", "sglang_reshard.receiver", "support.toy"]
)


@dataclass(frozen=True)
class Trainer:
    """What a trainer rank's function is given. `send` reaches the engine from rank 0, and is None elsewhere."""

    rank: int
    size: int
    send: Callable[[DistributedUpdateWeightsReq], DistributedUpdateWeightsOutput] | None

    @property
    def group(self) -> dist.ProcessGroup:
        return dist.group.WORLD


def run_world(
    trainers: int,
    engines: int,
    train: Callable[..., Any],
    serve: Callable[..., Any],
    *args: Any,
    deadline_s: float = 90.0,
) -> tuple[list[Any], list[Any]]:
    """Run `train(trainer, *args)` on every trainer rank and `serve(rank, size, requests, *args)` on every engine rank.

    `serve` iterates over `requests`, a `Requests`, and returns when it ends. Both results must be picklable.
    A process that fails, or all of them not ending within `deadline_s`, fails the test; none is left behind.
    """
    pipes = [_CONTEXT.Pipe() for _ in range(engines)]
    jobs = [(_trainer, (r, trainers, [a for a, _ in pipes] if r == 0 else [], train, args)) for r in range(trainers)]
    jobs += [(_engine, (r, engines, pipes[r][1], serve, args)) for r in range(engines)]
    # The stores are hosted here, so that they end last.
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    results: list[Any] = [None] * len(jobs)
    processes, readers = [], {}
    try:
        for i, (target, arguments) in enumerate(jobs):
            reader, writer = _CONTEXT.Pipe(duplex=False)
            port = stores[0 if i < trainers else 1].port
            process = _CONTEXT.Process(target=target, args=(writer, port, *arguments), daemon=True)
            process.start()
            writer.close()
            processes.append(process)
            readers[reader] = i
        for a, b in pipes:
            b.close()
            a.close()
        _collect(readers, results, trainers, time.monotonic() + deadline_s)
    finally:
        for process in processes:
            process.join(timeout=5 if process.exitcode is None else 0)
            if process.is_alive():
                process.kill()
                process.join()
    return results[:trainers], results[trainers:]


def _collect(readers: dict[Connection, int], results: list[Any], trainers: int, end: float) -> None:
    def name(i: int) -> str:
        return f"trainer rank {i}" if i < trainers else f"engine rank {i - trainers}"

    while readers:
        ready = wait(list(readers), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError(f"still running at the deadline: {[name(i) for i in readers.values()]}")
        for reader in ready:
            i = readers.pop(reader)  # type: ignore[call-overload]
            try:
                ok, value = reader.recv()  # type: ignore[union-attr]
            except EOFError:
                raise RuntimeError(f"{name(i)} ended without a word") from None
            if not ok:
                raise RuntimeError(f"{name(i)} failed:\n{value}")
            results[i] = value


def _report(writer: Connection, run: Callable[[], Any]) -> None:
    try:
        writer.send((True, run()))
    except BaseException:
        writer.send((False, traceback.format_exc()))


def _join(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))


def _trainer(
    writer: Connection, port: int, rank: int, size: int, engines: list[Connection], train: Any, args: Any
) -> None:
    def send(request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
        for engine in engines:
            engine.send_bytes(encode(request))
        outputs = [decode(engine.recv_bytes(), DistributedUpdateWeightsOutput) for engine in engines]
        assert all(o == outputs[0] for o in outputs), "engine ranks answered differently"
        return outputs[0]

    def run() -> Any:
        _join(rank, size, port)
        try:
            return train(Trainer(rank, size, send if rank == 0 else None), *args)
        finally:
            for engine in engines:
                engine.send_bytes(b"")  # the end of the requests

    _report(writer, run)


class Requests:
    """The requests that reach an engine rank; `answer` each of them."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __iter__(self) -> Requests:
        return self

    def __next__(self) -> DistributedUpdateWeightsReq:
        data = self._pipe.recv_bytes()
        if not data:
            raise StopIteration
        return decode(data, DistributedUpdateWeightsReq)

    def answer(self, output: DistributedUpdateWeightsOutput) -> None:
        self._pipe.send_bytes(encode(output))


def _engine(writer: Connection, port: int, rank: int, size: int, pipe: Connection, serve: Any, args: Any) -> None:
    def run() -> Any:
        _join(rank, size, port)
        return serve(rank, size, Requests(pipe), *args)

    _report(writer, run)
