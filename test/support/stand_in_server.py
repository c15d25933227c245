"""What stands between trainer rank 0 and the engine ranks of an orchestra, as SGLang's server does.

Like it, it takes engine rank 0's word for all of them, lets one update at a time through, and a staged one in parts
(`patches.tokenizer_manager`); and it ends when one of its processes does.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import dataclass

from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    Step,
    decode,
    encode,
)
from support.player import Player
from support.players import Answered, Ask

_POLL_S = 0.02
_ENDS_S = 1.5  # after one of its schedulers: SGLang looks once a second


@dataclass
class _Asked:
    """A trainer's update on its way through the engine."""

    trainer: Player
    number: int
    step: Step
    data: bytes
    poll_at: float | None = None


class StandInServer:
    """For engine ranks of one life.

    torn         whether its weights are, as it said last
    answered_at  when each engine rank answered, by the monotonic clock
    """

    def __init__(self, engines: list[Player]) -> None:
        self._engines = engines
        self._numbers = itertools.count(1)
        self._asked: _Asked | None = None
        self.torn = False
        self.answered_at: dict[int, float] = {}

    def begin(self, trainer: Player, data: bytes) -> None:
        """A request has come."""
        if self._asked is not None and self._asked.trainer.alive:
            _reply(trainer, "the update before is running; repeat this one when it has ended")
        elif dead := self._dead():
            _reply(trainer, f"the engine cannot be reached: {dead} ended")
        else:
            self._asked = asked = _Asked(trainer, 0, "update", data)
            self._ask(asked, "stage" if decode(data, DistributedUpdateWeightsReq).staged else "update")

    def hear(self, engine: Player, answered: Answered) -> None:
        self.answered_at[engine.rank] = answered.at
        asked = self._asked
        if engine.rank or asked is None or answered.number != asked.number:
            return
        output = decode(answered.output, DistributedUpdateWeightsOutput)
        if asked.step == "stage" and output.success:
            self._ask(asked, "staged")
        elif asked.step == "staged" and output.under_way:
            asked.poll_at = time.monotonic() + _POLL_S
        elif asked.step == "staged" and output.success:
            self._ask(asked, "commit")
        else:
            self._answer(asked, output)

    def patience_s(self) -> float:
        """Until `go_on` should be called again."""
        return _POLL_S if self._asked is not None and self._asked.poll_at is not None else 0.1

    def go_on(self) -> None:
        asked, now = self._asked, time.monotonic()
        if asked is None:
            return
        if any(p.gone_at and p.gone_at + _ENDS_S * bool(p.rank) < now for p in self._engines):
            self._answer(asked, f"the engine ended: {self._dead()} is dead")
        elif asked.poll_at is not None and asked.poll_at <= now:
            self._ask(asked, "staged")

    def _ask(self, asked: _Asked, step: Step) -> None:
        asked.number, asked.step, asked.poll_at = next(self._numbers), step, None
        # Polls are for the first rank only: who is stopped reads nothing, and a pipe holds just so much.
        for player in self._engines[:1] if step == "staged" else self._engines:
            if player.alive:
                player.owes += 1
                player.orders.send(Ask(asked.number, step, asked.data))

    def _answer(self, asked: _Asked, output: DistributedUpdateWeightsOutput | str) -> None:
        self._asked = None
        if isinstance(output, DistributedUpdateWeightsOutput) and (output.success or output.torn):
            self.torn = output.torn
        _reply(asked.trainer, output if isinstance(output, str) else encode(output))

    def _dead(self) -> str:
        return ", ".join(f"{p.name} (process {p.pid})" for p in self._engines if not p.alive)


def _reply(trainer: Player, answer: bytes | str) -> None:
    if trainer.alive:
        assert trainer.engine is not None
        with contextlib.suppress(BrokenPipeError):  # it has just been killed
            trainer.engine.send(answer)
