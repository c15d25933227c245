"""Trainer ranks and engine ranks as processes that are killed, stopped, continued and started again one by one.

    orchestra.start_engines(); orchestra.start_trainers()
    orchestra.arm(orchestra.engines[0], Arm("move"))
    orchestra.update(1, "ipc")
    orchestra.until_held(orchestra.engines[0])
    orchestra.kill(orchestra.trainers[1])
    orchestra.let_go(orchestra.engines[0])
    orchestra.until_ended()

It lives on whoever dies, and never waits without a deadline.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from sglang_reshard.protocol.messages import DEFAULT_TIMEOUT_S
from support import toy
from support.player import ANSWER_S, Hang, Player
from support.players import Answered, Call, Ended, Update, play_engine, play_trainer, versions
from support.stand_in_server import StandInServer
from support.stations import Act, Arm, At

_START_S = 300.0  # for processes to come up on a busy host; the first also wait for all imports


class Orchestra:
    """`retired` are trainer ranks of an earlier life that were only stopped."""

    def __init__(
        self, folder: Path, trainers: int = 2, engines: int = 2, url: str = "", hidden: int = toy.HIDDEN
    ) -> None:
        """`url`: of an SGLang server that trainer ranks update instead of engine ranks here; `hidden`: of the toy."""
        self._folder, self._sizes, self._url, self._hidden = folder, (trainers, engines), url, hidden
        self._lives = itertools.count(1)
        self.trainers: list[Player] = []
        self.engines: list[Player] = []
        self.retired: list[Player] = []
        self.server = StandInServer([])

    # -- lives

    def start_trainers(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Ranks of a new life of the trainer; those of the one before are killed unless they were set aside."""
        for player in self.trainers:
            self.kill(player)
        size, meeting = self._sizes[0], str(self._folder / f"meeting-{next(self._lives)}")
        arguments = size, meeting, timeout_s, self._url, self._hidden
        self.trainers = [Player.start("trainer", rank, play_trainer, arguments) for rank in range(size)]
        self._until_started(self.trainers)
        os.unlink(meeting)

    def start_engines(self) -> None:
        """Engine ranks of a new life, with version 0 of the weights."""
        for player in self.engines:
            self.kill(player)
        size = self._sizes[1]
        self.engines = [Player.start("engine", rank, play_engine, (size, self._hidden)) for rank in range(size)]
        self.server = StandInServer(self.engines)
        self._until_started(self.engines)

    def set_aside(self) -> None:
        """The trainer's ranks are another life's from now on, and not killed: they wake up later."""
        self.retired += self.trainers
        self.trainers = []

    def end(self) -> None:
        for player in self.everyone():
            self.kill(player)
        self.trainers, self.engines, self.retired = [], [], []
        self.server = StandInServer([])

    def everyone(self) -> list[Player]:
        return [*self.trainers, *self.engines, *self.retired]

    def busy(self) -> bool:
        return any(p.owes and p.alive for p in self.everyone())

    def kill(self, player: Player) -> float:
        """SIGKILL; when."""
        at = time.monotonic()
        if player.alive:
            player.process.kill()
            player.bury()
        return at

    # -- orders

    def arm(self, player: Player, arm: Arm) -> None:
        """An engine rank; trainer ranks are armed by `update`."""
        player.orders.send(arm)

    def update(
        self,
        version: int | None,
        transport: str,
        arms: dict[int, Arm] | None = None,
        bucket_bytes: int = 256,
        late: Player | None = None,
        **options: Any,
    ) -> None:
        """All trainer ranks that live begin an update, but for one that is late; `arms` are by trainer rank."""
        self.server.answered_at = {}
        for player in self.trainers:
            if player.alive and player is not late:
                arm = (arms or {}).get(player.rank)
                player.ended = None
                player.owes += 1
                player.orders.send(Update(version, transport, bucket_bytes, options, arm))

    def let_go(self, player: Player, act: Act = "go") -> None:
        """From the station that it is held at."""
        player.held = ""
        if player.alive:
            player.gate.send(act)

    def call(self, player: Player, function: Callable[..., Any], *arguments: Any, timeout_s: float = ANSWER_S) -> Any:
        """What a function returns in a process that has done all that it was told."""
        player.owes += 1
        player.orders.send(Call(function, arguments))
        self.until(lambda: not player.owes or not player.alive, timeout_s, f"{player.name} to answer a call")
        assert player.alive, f"{player.name} has died"
        return player.answers.pop()

    # -- waits

    def until_held(self, player: Player, timeout_s: float = ANSWER_S) -> None:
        """At a station. Fails when the update ends before that."""
        self.until(lambda: bool(player.held) or not self.busy(), timeout_s, f"{player.name} to come to its station")
        assert player.held, f"the update ended before {player.name} came to its station: {self.failures()}"

    def until_ended(self, timeout_s: float = ANSWER_S) -> None:
        """The update, on all ranks that live and are not stopped."""
        ranks = [p for p in [*self.trainers, *self.engines] if not p.stopped]
        self.until(lambda: not any(p.alive and p.owes for p in ranks), timeout_s, "an update to end on all ranks")

    def until(self, true: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Raises Hang, saying who owes an answer."""
        end = time.monotonic() + timeout_s
        while not true():
            if time.monotonic() > end:
                owing = [f"{p.name} ({p.held or 'busy'})" for p in self.everyone() if p.alive and p.owes]
                raise Hang(f"waited {timeout_s:g} s for {what}; these owe an answer: {', '.join(owing)}")
            self._turn(end - time.monotonic())

    # -- what became of it

    def failures(self) -> dict[str, Ended]:
        """How the last update ended on each trainer rank that lives."""
        return {p.name: p.ended for p in self.trainers if p.alive and p.ended is not None}

    def versions(self, *asked: int) -> list[int | None]:
        """Which of these versions each living engine rank has; None for none of them, or a mixture."""
        return [self.call(p, versions, asked)[0] for p in self.engines if p.alive]

    # -- the loop

    def _turn(self, patience_s: float) -> None:
        by_connection = {c: p for p in self.everyone() if p.alive for c in p.connections()}
        for ready in wait(list(by_connection), max(0.0, min(patience_s, self.server.patience_s()))):
            player = by_connection[ready]  # type: ignore[index]
            if not player.alive:  # as another of its connections has told
                continue
            try:
                self._hear(player, ready.recv())  # type: ignore[union-attr]
            except (EOFError, ConnectionResetError):
                player.bury()
        self.server.go_on()

    def _hear(self, player: Player, said: Any) -> None:
        if isinstance(said, At):
            player.held = said.station
            return
        if isinstance(said, bytes):
            self.server.begin(player, said)
            return
        player.owes -= 1
        if isinstance(said, Answered):
            if player in self.engines:
                self.server.hear(player, said)
        elif isinstance(said, Ended):
            player.ended = said
        else:
            player.answers.append(said)

    def _until_started(self, players: list[Player]) -> None:
        self.until(lambda: all(not p.owes or not p.alive for p in players), _START_S, "processes to start")
        dead = [p.name for p in players if not p.alive]
        assert not dead, f"{dead} ended while they started"
        for player in players:
            player.answers.clear()
