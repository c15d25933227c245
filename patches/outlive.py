"""An embedded engine whose processes may die without the process that embeds it, which is a trainer.

SGLang treats the process of its tokenizer manager as its own: when a scheduler dies, that process is killed (SIGQUIT,
and its handler kills the whole tree), or, if it was busy with something else when the signal came, its next call of
the engine waits for ever. After `outlive(engine)` instead

    every call of the engine, also one under way, raises EngineDied and says which process has gone
    the process's signals are its own again: SIGTERM as it had it, and SIGQUIT, with which SGLang's processes say
    that they fail, is logged and forgotten until `patches.engine.end`
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
import threading
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import psutil

from sglang_reshard.errors import EngineDied
from sglang_reshard.patches.shared_segments import segments_of

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from sglang.srt.entrypoints.engine import Engine

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CHILDREN = "_reshard_children"  # on the engine
_LOOK_EVERY_S = 0.5
_CANCEL_S = 1.0  # for a call under way to let go of its locks
_LAST_THREADS_S = 1.0  # a killed process has no exit code before all its threads have gone

_outlived: WeakSet[Engine] = WeakSet()


@dataclass(frozen=True)
class Child:
    """One process of an engine. `handle` is None for a child's child: nobody tells us that one's exit code."""

    name: str
    process: psutil.Process
    handle: BaseProcess | None

    def ended(self) -> str:
        """How it ended; empty while it runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE:
                return ""
        code = None
        if self.handle is not None:
            self.handle.join(_LAST_THREADS_S)
            code = self.handle.exitcode
        return f"{self.name} (process {self.process.pid}) ended with exit code {'unknown' if code is None else code}"


@dataclass(frozen=True)
class Children:
    """All processes of an engine, and the shared memory that they had when they were looked up."""

    members: tuple[Child, ...]
    segments: frozenset[Path]

    @classmethod
    def of(cls, engine: Engine) -> Children:
        """Those that run now; if `outlive` was called, those that ran then."""
        kept: Children | None = getattr(engine, _CHILDREN, None)
        if kept is not None:
            return kept
        handles = {process.pid: process for process in multiprocessing.active_children()}
        members = []
        for pid in engine.get_all_child_pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                members.append(Child(_title(process), process, handles.get(pid)))
        return cls(tuple(members), frozenset(segments_of(member.process.pid for member in members)))

    def ended(self) -> str:
        """Which have ended, and how; empty while all run."""
        return "; ".join(filter(None, (member.ended() for member in self.members)))


def outlive(engine: Engine) -> None:
    """Keep this process alive, and its calls answered, when one of the engine's processes dies.

    To be called once, when the engine has started and before it is used. Processes on other nodes are not seen from
    here; what they do to the ones on this node is.
    """
    manager = engine.tokenizer_manager
    children = Children.of(engine)
    setattr(engine, _CHILDREN, children)
    _outlived.add(engine)
    if manager is None:  # on a node other than the first there is nothing to call
        _take_back_signals()
        return
    if manager._subprocess_watchdog is not None:
        manager._subprocess_watchdog.stop()
    terminate = signal.getsignal(signal.SIGTERM)

    async def start() -> None:
        manager.auto_create_handle_loop()  # here, because it takes the signals
        if _in_main_thread():
            for number in (signal.SIGTERM, signal.SIGQUIT):
                engine.loop.remove_signal_handler(number)

    engine.loop.run_until_complete(start())
    _take_back_signals(terminate)
    engine.loop = _WatchedLoop(engine.loop, children)


def ended(engine: Engine) -> None:
    """The engine's processes have been ended on purpose: SIGQUIT means again what it means to any process."""
    _outlived.discard(engine)
    if not _outlived and _in_main_thread() and signal.getsignal(signal.SIGQUIT) is _on_quit:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


class _WatchedLoop:
    """SGLang's event loop, as its Engine uses it, where no call outlasts the engine's processes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, children: Children) -> None:
        self._loop = loop
        self._children = children

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def run_until_complete(self, call: Awaitable[T]) -> T:
        return self._loop.run_until_complete(self._watch(call))

    async def _watch(self, call: Awaitable[T]) -> T:
        task = asyncio.ensure_future(call)
        while not (await asyncio.wait([task], timeout=_LOOK_EVERY_S))[0]:
            if gone := self._children.ended():
                task.cancel()
                await asyncio.wait([task], timeout=_CANCEL_S)
                raise EngineDied(_ADVICE.format(gone))
        try:
            return task.result()
        except Exception as error:
            if gone := self._children.ended():  # whatever the call says, that is the reason to know
                raise EngineDied(_ADVICE.format(gone)) from error
            raise


_ADVICE = "the engine cannot go on: {}. Look at its log, shut it down and start it again"


def _take_back_signals(terminate: Any = None) -> None:
    if _in_main_thread():
        signal.signal(signal.SIGQUIT, _on_quit)
        if terminate is not None:
            signal.signal(signal.SIGTERM, terminate)


def _on_quit(*_: Any) -> None:
    logger.error("A process of an engine says that it fails (SIGQUIT); the next call of that engine says which")


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _title(process: psutil.Process) -> str:
    """SGLang gives its processes titles, "sglang::scheduler_TP0" for example."""
    return next(iter(process.cmdline()), "").removeprefix("sglang::") or "a process"
