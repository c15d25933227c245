"""Runs calls in other threads as their caller would run them: with its GPU, its attributes of log lines and its span.

A new thread has none of these: it starts at GPU 0. These threads do not break a CUDA graph capture that the caller
begins at the same time.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from sglang_reshard.gpu.runtime import runtime

T = TypeVar("T")
PREFIX = "sglang-reshard"  # of threads' names


def carried(call: Callable[..., T]) -> Callable[..., T]:
    """Returns `call` as other threads are to run it, any number of them at once."""
    context = contextvars.copy_context()
    gpu = runtime().current_device() if runtime().uses_gpu() else None

    def run(*arguments: Any) -> T:
        with nullcontext() if gpu is None else runtime().using(gpu):
            runtime().spare_captures()
            return context.copy().run(call, *arguments)

    return run


def start(name: str, call: Callable[[], T], *, daemon: bool = True) -> Future[T]:
    """Runs `call` in a separate thread. Returns what it will return, or raise.

    name    of the thread, after `PREFIX`
    daemon  the end of the process ends it; otherwise the process ends after it
    """
    found: Future[T] = Future()
    gpu = runtime().current_device() if runtime().uses_gpu() else None
    run, arguments = contextvars.copy_context().run, (_run, found, gpu, call)
    threading.Thread(target=run, args=arguments, name=f"{PREFIX} {name}", daemon=daemon).start()
    return found


def _run(found: Future[T], gpu: torch.device | None, call: Callable[[], T]) -> None:
    try:
        with nullcontext() if gpu is None else runtime().using(gpu):
            runtime().spare_captures()
            found.set_result(call())
    except BaseException as error:
        found.set_exception(error)
        del found, call  # else the error's traceback would keep itself, and what `call` refers to
