"""Compares a process's environment, and watches who changes NCCL's settings while others do."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.virtual_gpus.journal import Journal

_NAMES = ("NCCL_", "TORCH_NCCL_", "CUDA_")


class Environment:
    """This process's. A setting that one thread has changed must be as it was before another changes any."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._changed: dict[str, tuple[int, str | None]] = {}  # name -> the thread that changed it, and what it was
        self._lock = threading.RLock()

    def install(self) -> None:
        kind = type(os.environ)
        set_, del_ = kind.__setitem__, kind.__delitem__

        def set_item(environ: Any, name: str, value: str) -> None:
            self._change(name, value)
            set_(environ, name, value)

        def delete_item(environ: Any, name: str) -> None:
            self._change(name, None)
            del_(environ, name)

        kind.__setitem__, kind.__delitem__ = set_item, delete_item  # type: ignore[method-assign,assignment]

    def _change(self, name: str, value: str | None) -> None:
        if not name.startswith(_NAMES):
            return
        with self._lock:
            own = threading.get_ident()
            if others := sorted(n for n, (thread, _) in self._changed.items() if thread != own):
                raise self._journal.broken(f"{name} was changed while another thread had changed {others}")
            if name not in self._changed:
                self._changed[name] = own, os.environ.get(name)
            if self._changed[name][1] == value:
                del self._changed[name]

    @contextmanager
    def unchanged(self, during: str) -> Iterator[None]:
        before = dict(os.environ)
        yield
        after = dict(os.environ)
        names = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
        if names:
            raise self._journal.broken(f"{during} left another environment: {names}")
