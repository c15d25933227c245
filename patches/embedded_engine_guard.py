"""Keeps the trainer process alive, and raises EngineDied, when a process of its embedded engine dies.

SGLang treats the process of its tokenizer manager as its own: when a scheduler dies, that process is killed (SIGQUIT,
whose handler kills the whole process tree), or, if it was busy when the signal came, its next call of the engine waits
forever. After `watch_processes(engine)`

    every call of the engine, including one in progress, raises EngineDied, which names the process that ended
    the embedding process has its own signal handlers again: SIGTERM as before. SIGQUIT, which SGLang's processes
    send to report a failure, is logged and ignored until `patches.engine.end`
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

_PROCESSES = "_reshard_processes"  # on the engine
_POLL_S = 0.5
_CANCEL_S = 1.0  # for a cancelled call to release its locks
_LAST_THREADS_S = 5.0  # a killed process has no exit code until all its threads have ended

_watched: WeakSet[Engine] = WeakSet()


@dataclass(frozen=True)
class EngineProcess:
    """One process of an engine. `handle` is None for a grandchild, whose exit code this process cannot read."""

    name: str
    process: psutil.Process
    handle: BaseProcess | None

    def exit_report(self) -> str:
        """Returns how the process ended; empty while it runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE:
                return ""
        code = None
        if self.handle is not None:
            self.handle.join(_LAST_THREADS_S)
            code = self.handle.exitcode
        return f"{self.name} (process {self.process.pid}) ended with exit code {'unknown' if code is None else code}"


@dataclass(frozen=True)
class EngineProcesses:
    """All processes of an engine, and the shared memory that they had mapped when this was created."""

    members: tuple[EngineProcess, ...]
    segments: frozenset[Path]

    @classmethod
    def of(cls, engine: Engine) -> EngineProcesses:
        """Returns those that run now, or that ran when `watch_processes` was called."""
        watched: EngineProcesses | None = getattr(engine, _PROCESSES, None)
        if watched is not None:
            return watched
        handles = {process.pid: process for process in multiprocessing.active_children()}
        members = []
        for pid in engine.get_all_child_pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                members.append(EngineProcess(_title(process), process, handles.get(pid)))
        return cls(tuple(members), frozenset(segments_of(member.process.pid for member in members)))

    def death(self) -> str:
        """Returns which processes ended, how, and what to do; empty while all run."""
        if not (exited := "; ".join(filter(None, (member.exit_report() for member in self.members)))):
            return ""
        return f"the engine cannot continue: {exited}. Look at its log, shut it down and start it again"


def watch_processes(engine: Engine) -> None:
    """Keeps this process alive, and its calls returning, when one of the engine's processes dies.

    Call it once, after the engine has started and before it is used. Processes on other nodes are not watched, only
    their effects on the processes of this node.
    """
    manager = engine.tokenizer_manager
    processes = EngineProcesses.of(engine)
    setattr(engine, _PROCESSES, processes)
    _watched.add(engine)
    if manager is None:  # nodes other than the first have no calls to watch
        _restore_signal_handlers()
        return
    if manager._subprocess_watchdog is not None:
        manager._subprocess_watchdog.stop()
    sigterm_handler = signal.getsignal(signal.SIGTERM)

    async def start() -> None:
        manager.auto_create_handle_loop()  # here, because it installs signal handlers
        if _in_main_thread():
            for number in (signal.SIGTERM, signal.SIGQUIT):
                engine.loop.remove_signal_handler(number)

    engine.loop.run_until_complete(start())
    _restore_signal_handlers(sigterm_handler)
    engine.loop = _WatchedLoop(engine.loop, processes)


def death(engine: Engine) -> str:
    """Returns `EngineProcesses.death` of an engine; empty for one that is not watched."""
    watched: EngineProcesses | None = getattr(engine, _PROCESSES, None)
    return watched.death() if watched is not None else ""


def unwatch(engine: Engine) -> None:
    """Restores SIGQUIT's default action once no engine is watched. Call it after ending the engine's processes."""
    _watched.discard(engine)
    if not _watched and _in_main_thread() and signal.getsignal(signal.SIGQUIT) is _on_sigquit:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


class _WatchedLoop:
    """SGLang's event loop, as its Engine uses it, with calls that fail when a process of the engine ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop, processes: EngineProcesses) -> None:
        self._loop = loop
        self._processes = processes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def run_until_complete(self, call: Awaitable[T]) -> T:
        return self._loop.run_until_complete(self._watch(call))

    async def _watch(self, call: Awaitable[T]) -> T:
        task = asyncio.ensure_future(call)
        while not (await asyncio.wait([task], timeout=_POLL_S))[0]:
            if died := self._processes.death():
                task.cancel()
                await asyncio.wait([task], timeout=_CANCEL_S)
                raise EngineDied(died)
        try:
            return task.result()
        except Exception as error:
            if died := self._processes.death():  # the cause of whatever the call raised
                raise EngineDied(died) from error
            raise


def _restore_signal_handlers(sigterm_handler: Any = None) -> None:
    if _in_main_thread():
        signal.signal(signal.SIGQUIT, _on_sigquit)
        if sigterm_handler is not None:
            signal.signal(signal.SIGTERM, sigterm_handler)


def _on_sigquit(*_: Any) -> None:
    logger.error("A process of an engine reported a failure (SIGQUIT); the next call of that engine names the process")


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _title(process: psutil.Process) -> str:
    """Returns the title that SGLang gives its process, "scheduler_TP0" for example."""
    return next(iter(process.cmdline()), "").removeprefix("sglang::") or "a process"
