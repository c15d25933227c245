"""One process of an orchestra, as the process that started it has it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.players import Ended, Links
from support.ready import CONTEXT

ANSWER_S = 180.0  # for a process that is not in an update to answer


class Hang(AssertionError):
    """Somebody did not do in time what had to happen."""


@dataclass(eq=False)
class Player:
    """One process.

    engine    trainer rank 0's way to the engine
    process   None once it has ended
    held      the station that it waits at
    ended     how its last update ended, for a trainer rank
    owes      how many orders it has not answered yet
    gone_at   when it was found to have ended, by the monotonic clock
    """

    name: str
    rank: int
    pid: int
    process: Any
    orders: Connection
    gate: Connection
    engine: Connection | None
    held: str = ""
    ended: Ended | None = None
    owes: int = 0
    answers: list[Any] = field(default_factory=list)
    gone_at: float | None = None
    stopped: bool = False

    @classmethod
    def start(cls, side: str, rank: int, play: Callable[..., None], arguments: tuple[Any, ...]) -> Player:
        """`play(rank, *arguments, links)` in a process. It answers once, with anything, when it is ready."""
        pipes = [CONTEXT.Pipe() for _ in range(3 if (side, rank) == ("trainer", 0) else 2)]
        ours, theirs = [a for a, _ in pipes], [b for _, b in pipes]
        links = Links(theirs[0], theirs[1], theirs[2] if len(theirs) == 3 else None)
        process = CONTEXT.Process(target=play, args=(rank, *arguments, links), daemon=True)
        process.start()
        for end in theirs:
            end.close()
        assert process.pid is not None
        engine = ours[2] if len(ours) == 3 else None
        return cls(f"{side} rank {rank}", rank, process.pid, process, ours[0], ours[1], engine, owes=1)

    @property
    def alive(self) -> bool:
        return self.gone_at is None

    def connections(self) -> list[Connection]:
        return [c for c in (self.orders, self.gate, self.engine) if c is not None]

    def bury(self) -> None:
        """It has been killed, or has ended."""
        self.gone_at = time.monotonic()
        self.process.join()
        self.process.close()
        self.process = None
        for connection in self.connections():
            connection.close()

    def stop(self) -> float:
        """SIGSTOP; when all of its threads have stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        self.stopped = True
        end = time.monotonic() + ANSWER_S
        while not self._sleeps():
            if time.monotonic() > end:
                raise Hang(f"{self.name} could not be stopped")
            time.sleep(0.001)
        return time.monotonic()

    def wake(self) -> None:
        self.stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def _sleeps(self) -> bool:
        letters = set()
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                letters.add((task / "stat").read_text().rpartition(")")[2].split()[0])
        return letters == {"T"}
