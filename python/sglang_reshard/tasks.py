"""Runs calls in other threads as their caller would run them: with its GPU, its attributes of log lines and its span.

A new thread has none of these: it starts at GPU 0. These threads do not break a CUDA graph capture that the caller
begins at the same time.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext
from typing import Any, TypeVar

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
    threading.Thread(target=_run, args=(found, carried(call)), name=f"{PREFIX} {name}", daemon=daemon).start()
    return found


@asynccontextmanager
async def entered(make: Callable[[], AbstractContextManager[T]]) -> AsyncIterator[T]:
    """Runs both ends of a context manager in other threads, its end also if this is cancelled while it begins."""
    loop, stack = asyncio.get_running_loop(), ExitStack()
    entering = asyncio.ensure_future(asyncio.to_thread(lambda: stack.enter_context(make())))

    def leave(begun: asyncio.Future[T]) -> None:
        if not begun.cancelled() and begun.exception() is None:
            loop.run_in_executor(None, stack.close)

    try:
        found = await asyncio.shield(entering)
    except asyncio.CancelledError:
        entering.add_done_callback(leave)
        raise
    try:
        yield found
    finally:
        await asyncio.shield(asyncio.to_thread(stack.close))


def _run(found: Future[T], call: Callable[[], T]) -> None:
    try:
        found.set_result(call())
    except BaseException as error:
        found.set_exception(error)
        del found, call  # else the error's traceback would keep itself, and what `call` refers to
