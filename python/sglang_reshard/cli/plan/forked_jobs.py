"""Runs jobs in forked children: slow imports happen once, and each child has its own globals."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from sglang_reshard.errors import DeadlineExceeded, ReshardError

Job = TypeVar("Job")


class ChildFailed(ReshardError):
    """A forked child raised; the message has its traceback."""


def run_in_forks(
    work: Callable[[Job], Any], jobs: Sequence[Job], *, processes: int, deadline_seconds: float
) -> Iterator[tuple[Job, Any]]:
    """Yields each job with the result of `work(job)`, run in a separate child, in the order in which they end.

    At most `processes` children run at a time. All of them are gone when this returns or raises. Raises
    ChildFailed with the traceback of the first that failed, DeadlineExceeded when the jobs take longer.
    """
    deadline = time.monotonic() + deadline_seconds
    todo = list(jobs)
    running: dict[Connection, tuple[Job, BaseProcess]] = {}
    try:
        while todo or running:
            while todo and len(running) < processes:
                job = todo.pop(0)
                reader, child = _start(work, job)
                running[reader] = job, child
            ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(str(job) for job, _ in running.values())
                raise DeadlineExceeded(f"Not finished within {deadline_seconds:g} s: {late}.")
            for reader in [r for r in running if r in ready]:
                job, child = running.pop(reader)
                yield job, _result(job, reader, child)
    finally:
        for reader, (_, child) in running.items():
            child.kill()
            child.join()
            reader.close()


def _start(work: Callable[[Job], Any], job: Job) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def run() -> None:
        # A fork has none of its parent's OpenMP threads, and an operator that divides its work waits for them.
        torch.set_num_threads(1)
        try:
            writer.send((True, work(job)))
        except BaseException:
            writer.send((False, traceback.format_exc()))

    child = context.Process(target=run)
    child.start()
    writer.close()
    return reader, child


def _result(job: Any, reader: Connection, child: BaseProcess) -> Any:
    try:
        ok, value = reader.recv()
    except EOFError:
        child.join()
        raise ChildFailed(f"The child for {job} died with exit code {child.exitcode}.") from None
    finally:
        reader.close()
    child.join()
    if not ok:
        raise ChildFailed(f"The child for {job} failed:\n{value}")
    return value
