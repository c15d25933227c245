"""Other processes that do for an item what it tells them to."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch

from benchmark.gpu.place import Place

_ANSWER_S = 50.0  # less than an item may take, so that the item can say who did not answer


class PeerFailed(Exception):
    """The function raised in the other process; the message is its traceback."""


class PeerLost(Exception):
    """The other process ended, or did not answer in time."""


class Here:
    """What a function that runs in a process of the battery is given: its place, and what earlier ones have kept."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.kept: dict[str, Any] = {}


class Peer:
    """Another process. `call(function, ...)` runs `function(here, ...)`, of a module, there.

    Forked, so that it does not import torch again; so it must be made before this process uses the GPU. With `fresh` it
    is started from nothing, for choices that torch makes at its import.
    """

    def __init__(self, place: Place, *, fresh: bool = False) -> None:
        self.place = place
        fresh = fresh and not place.rehearsed
        assert fresh or place.start != "fork" or not torch.cuda.is_initialized(), "peers come before the GPU is used"
        context: Any = multiprocessing.get_context("spawn" if fresh else place.start)
        self._link, its_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(its_end, place), daemon=True)
        with mock.patch.dict(os.environ, place.variables if fresh else {}):
            self._process.start()
        its_end.close()

    @property
    def pid(self) -> int:
        found: int = self._process.pid
        return found

    @property
    def alive(self) -> bool:
        return bool(self._process.is_alive())

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._link.send((function, arguments))

    def result(self, timeout_s: float = _ANSWER_S) -> Any:
        """Returns what the function that was started returns. Raises PeerFailed and PeerLost."""
        try:
            if not self._link.poll(timeout_s):
                self.signal(signal.SIGUSR1)  # it says where it is
                time.sleep(0.5)
                raise PeerLost(f"{self.place.name} did not answer within {timeout_s:.0f} s")
            ok, value = self._link.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            raise PeerLost(f"{self.place.name} ended with exit code {self._process.exitcode}") from None
        if not ok:
            raise PeerFailed(f"in {self.place.name}:\n{value}")
        return value

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = _ANSWER_S) -> Any:
        self.start(function, *arguments)
        return self.result(timeout_s)

    def kill(self) -> None:
        """Ends it as the host's out-of-memory killer does, and waits until the system has cleaned up after it."""
        self.signal(signal.SIGKILL)
        self._process.join(20)
        self.place.clean_up()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._link.send(None)
        self._process.join(10)
        if self._process.is_alive():
            self.kill()


def everywhere(peers: list[Peer], function: Any, *arguments: Any, ranked: bool = False) -> list[Any]:
    """Runs a function in all of these at once. ranked: with the number of each as the first argument."""
    for rank, peer in enumerate(peers):
        peer.start(function, *([rank] if ranked else []), *arguments)
    return [peer.result() for peer in peers]


def _serve(link: Connection, place: Place) -> None:
    here = Here(place)
    torch.set_num_threads(1)  # as in runner.py
    faulthandler.register(signal.SIGUSR1)
    entered = False
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (job := link.recv()) is not None:
            function, arguments = job
            try:
                if not entered:
                    place.enter()
                    entered = True
                link.send((True, function(here, *arguments)))
            except BaseException:
                link.send((False, traceback.format_exc()))
