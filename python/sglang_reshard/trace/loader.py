"""How the model's loader is run: its thread pools inline, and what it does after loading held back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_HOOK = "post_load_weights"


class DeferredCall(NamedTuple):
    """A call of `post_load_weights` that the loader made."""

    path: str
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def inline_thread_pools() -> Iterator[None]:
    """Run what this thread submits to a ThreadPoolExecutor in this thread: a dispatch mode is thread-local."""
    thread, submit = threading.get_ident(), ThreadPoolExecutor.submit

    def inline(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if threading.get_ident() != thread:
            return submit(self, fn, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future

    ThreadPoolExecutor.submit = inline  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


@contextmanager
def collector_paused() -> Iterator[None]:
    """A trace makes many small objects that all stay; the garbage collector would walk them over and over."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def held_post_load(model: torch.nn.Module) -> Iterator[list[DeferredCall]]:
    """Collect the calls of `post_load_weights`, which would compute with weights that are not there yet."""
    held: list[DeferredCall] = []
    hooked: list[torch.nn.Module] = []
    for path, module in model.named_modules():
        if not callable(getattr(module, _HOOK, None)) or _HOOK in vars(module):
            continue

        def hold(*args: Any, _path: str = path, _module: torch.nn.Module = module, **kwargs: Any) -> None:
            held.append(DeferredCall(_path, _module, args, kwargs))

        vars(module)[_HOOK] = hold
        hooked.append(module)
    try:
        yield held
    finally:
        for module in hooked:
            del vars(module)[_HOOK]
