"""Points in the middle of an update at which a process can be held, made to fail, or have a bit flipped.

    stations = Stations(gate).install("engine")
    stations.arm(Arm("move"))      # the next time this process comes there, it says so over `gate` and waits

Stations are called as the update's phases are. At "move" half of a list of copies has been made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch

from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.engine.prepared import Transfers
from sglang_reshard.engine.target_planner import TargetPlanner
from sglang_reshard.engine.update import UpdateExecutor
from sglang_reshard.landings.checked.source import TrainerChecks
from sglang_reshard.protocol.update_channel import EngineChannel, TrainerChannel
from sglang_reshard.routes.delta import target as delta_target
from sglang_reshard.routes.delta import trainer as delta_trainer
from sglang_reshard.routes.delta.source import DeltaSource
from sglang_reshard.routes.nixl.reader import NixlReader
from sglang_reshard.routes.p2p.trainer import P2pSender
from sglang_reshard.routes.wire.communicator import Communicators
from sglang_reshard.trace.program import Program
from sglang_reshard.trainer.publisher import ShardPublisher
from sglang_reshard.trainer.worker import EngineTransfers

Act = Literal["wait", "go", "raise", "flip"]


@dataclass(frozen=True)
class Arm:
    """What a process does when it comes to a station, once.

    act   "wait" until it is told what else, "raise" an error, "flip" a bit of what has arrived (at "verify")
    skip  how many times it passes first
    """

    station: str
    act: Act = "wait"
    skip: int = 0


@dataclass(frozen=True)
class At:
    """A process has come to a station and waits."""

    station: str


class Stumbled(OSError):
    """What a process raises that was told to."""


class Stations:
    """One process's. `gate` leads to whoever holds it."""

    def __init__(self, gate: Connection) -> None:
        self._gate = gate
        self._armed: Arm | None = None
        self._passed = 0

    def arm(self, arm: Arm | None) -> None:
        self._armed, self._passed = arm, 0

    def install(self, side: Literal["engine", "trainer"]) -> Stations:
        self._before(CopyList, "run", "move", _half)
        if side == "engine":
            self._before(TargetPlanner, "_plan", "look")
            self._before(Transfers, "plan", "plan")
            self._before(Transfers, "connect", "connect")
            self._before(NixlReader, "start", "read")
            self._before(delta_target, "apply", "apply")
            self._before(UpdateExecutor, "_verify", "verify", flip=_flip_a_bit)
            self._before(Program, "run_steps", "commit")
            self._after_the_last_gather()
        else:
            self._before(ShardPublisher, "publish", "publish")
            self._before(TrainerChannel, "publish_status", "announce")
            self._before(EngineTransfers, "_prepare", "plan")
            self._before(Communicators, "connect", "connect")
            self._before(P2pSender, "send", "send")
            self._before(DeltaSource, "encode", "encode")
            self._before(delta_trainer, "send_sections", "send deltas")
            self._before(TrainerChecks, "_checksums", "verify")
        return self

    def _come_to(self, station: str, begin: Callable[[], None], flip: Callable[[], None]) -> None:
        """`begin` is done where this process does not just pass."""
        armed = self._armed
        if armed is None or armed.station != station:
            return
        if self._passed < armed.skip:
            self._passed += 1
            return
        self._armed, act = None, armed.act
        begin()
        if act == "wait":
            self._gate.send(At(station))
            act = self._gate.recv()
        if act == "raise":
            raise Stumbled(f"stumbled at {station!r}, as it was told to")
        if act == "flip":
            flip()

    def _before(
        self,
        owner: Any,
        name: str,
        station: str,
        begin: Callable[[Any], None] = lambda _: None,
        flip: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """Have a function of a class or a module come to a station first."""
        stock = getattr(owner, name)

        @functools.wraps(stock)
        def at_station(*args: Any, **kwargs: Any) -> Any:
            self._come_to(station, lambda: begin(args[0]), lambda: flip(args[0]))
            return stock(*args, **kwargs)

        setattr(owner, name, at_station)

    def _after_the_last_gather(self) -> None:
        """All ranks have agreed that the update succeeded; this one has not told anybody yet."""
        stock = EngineChannel.all_gather

        @functools.wraps(stock)
        def all_gather(channel: EngineChannel, phase: str, *args: Any) -> Any:
            messages = stock(channel, phase, *args)
            if phase == "commit":
                self._come_to("agreed", lambda: None, lambda: None)
            return messages

        EngineChannel.all_gather = all_gather  # type: ignore[method-assign]


def _half(copies: CopyList) -> None:
    """Make half of the copies. All of them follow."""
    half = len(copies._destinations) // 2
    if half:
        with torch.inference_mode():
            torch._foreach_copy_(copies._destinations[:half], copies._sources[:half])


def _flip_a_bit(executor: UpdateExecutor) -> None:
    """Of what has arrived in `down`, where it is to be verified."""
    transfer = executor.transfer
    targets = transfer.landing.program.targets
    landed = next(target for name, target in targets.items() if name.startswith("down"))
    landed.view(torch.int32)[5] ^= 1 << 7
