"""The interface between the core and a route: an engine rank's end, a trainer rank's end, and their arguments.

In an update for which nothing can be used again:

    engine ranks   engine_end(side, strategy)    all know the demands of all
                   end.ask()                     engine rank 0 sends it to all trainer ranks, as `Prepare`
    trainer ranks  trainer_end(side, command)    report ready
    both           end.connect(meeting)
    trainer ranks  end.start(taken)              if the engine's end calls them
    engine ranks   end.move(request, taken)
    trainer ranks  end.commit(update)            the engine has the weights

In all others only the last three. An end owns all that it needs, connections, views and buffers, until it is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sglang_reshard.landings.base import Landing
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.memory.peer_memory import PeerMemory
from sglang_reshard.observability.report import Traffic
from sglang_reshard.plan import ReadPlan, TensorIndex
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, Prepare, encode
from sglang_reshard.protocol.session import Session

if TYPE_CHECKING:  # a trainer rank sends without the tracer
    from sglang_reshard.trace.program import Program


@dataclass(frozen=True, slots=True)
class Reads:
    """The elements that one engine rank reads, and where they are written.

    landing    where they arrive; the route places it
    memory     trainer rank -> its mapped memory, for the trainer ranks whose memory this rank reads
    timeout_s  seconds that any one wait may last
    """

    engine_rank: int
    device: torch.device
    tensor_index: TensorIndex
    read_plan: ReadPlan
    landing: Landing
    memory: Mapping[int, PeerMemory]
    timeout_s: float = 0.0

    @property
    def program(self) -> Program:
        return self.landing.program


@dataclass(frozen=True, slots=True)
class EngineSide:
    """One engine rank's side of a plan.

    request     for which it is planned
    live        the program that writes the live weights; `reads.program` may write to others
    read_plans  digest of each engine rank's read plan
    transfer    names the transfer between both sides
    kept        by the name of a route, what its ends on this engine rank keep from transfer to transfer
    """

    reads: Reads
    request: DistributedUpdateWeightsReq
    live: Program
    read_plans: tuple[str, ...]
    transfer: str
    kept: dict[str, Kept]

    @property
    def engine_rank(self) -> int:
        return self.reads.engine_rank

    def prepare(self, route: str, message: Any) -> Prepare:
        """Returns the command to make trainer ranks' ends of this name, and their message, a msgspec struct."""
        return Prepare(self.transfer, route, encode(message), self.reads.timeout_s)


def _no_gather(name: str, _message: Any) -> list[Any]:
    raise AssertionError(f"a trainer rank gathers no {name}")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where both ends of a transfer connect, during an update.

    scope   of the update on the control server; its end ends all waits
    update  number of the update within the session
    gather  returns every engine rank's message of a name; collective over engine ranks, for these only
    kept    names of the parameters that any engine rank leaves as they are
    """

    session: Session
    scope: str
    update: int
    gather: Callable[[str, Any], list[Any]] = _no_gather
    kept: tuple[str, ...] = ()


class Kept(Protocol):
    """The state that the ends of a route keep on one engine rank from transfer to transfer."""

    def failed(self, request: DistributedUpdateWeightsReq) -> None:
        """The update has failed; it may never have come as far as an end of this route."""

    def close(self) -> None:
        """Drops all that depends on other ranks."""

    def release_pages(self) -> None:
        """The pages of the live weights are about to be released; others will be at their addresses."""


class Connections(Protocol):
    """Connections to other ranks."""

    def abort(self) -> None:
        """Ends this rank's waits. May be called from any thread."""

    def close(self) -> None: ...


class _End:
    """One rank's end of a route.

    holds_pages  it has registered weights, and so means their pages, not their addresses
    connections  to other ranks, from before they connect; None if there are none
    """

    holds_pages: bool = False
    connections: Connections | None = None

    def abort(self) -> None:
        """Ends this rank's waits for other ranks. Called from another thread."""
        if (connections := self.connections) is not None:
            connections.abort()

    def close(self) -> None:
        """Closes the connections. The caller of `close` drops the end, and with it views and buffers."""
        if self.connections is not None:
            self.connections.close()


class EngineEnd(_End):
    """One engine rank's end of a route, for one plan.

    calls    trainer ranks take part in a move: they are told to start
    nbytes   of the buffers held between updates, without those of the landing
    traffic  of the last move
    """

    calls: bool = False
    nbytes: int = 0
    traffic: Traffic = Traffic()

    def ask(self, session: Session) -> Prepare | None:
        """Returns what the trainer ranks are asked to prepare, see `EngineSide.prepare`; None if they need not.

        The same on all engine ranks. May publish in the session what a trainer rank's end will look for there.
        """
        return None

    def connect(self, meeting: Meeting) -> None:
        """Connects, and makes all views and buffers. Collective over engine ranks and trainer ranks that are asked."""
        raise NotImplementedError

    def serves(self, request: DistributedUpdateWeightsReq) -> bool:
        """Returns whether this end can be used for `request`, for all that this route knows of it."""
        return True

    def accepts(self, request: DistributedUpdateWeightsReq) -> bool:
        """Returns whether this rank can take the trainer ranks' offers in `request` instead of all weights."""
        return False

    def check(self, request: DistributedUpdateWeightsReq) -> None:
        """Receives what has to be checked before anything is written. Only of an offer that all engine ranks take."""

    def move(self, request: DistributedUpdateWeightsReq, taken: bool) -> None:
        """Brings the weights to where `Reads.program` writes them; with `taken`, from the offers.

        The caller closes an end that fails, so that ranks that wait for this one fail as well.
        """
        raise NotImplementedError

    def has_arrived(self, request: DistributedUpdateWeightsReq) -> None:
        """The weights of `request` have arrived by the route around this one."""


class AroundEnd(EngineEnd):
    """One engine rank's end of a route around another, to which it leaves all that it does not do itself."""

    def __init__(self, inner: EngineEnd) -> None:
        self.inner = self.connections = inner
        self.calls, self.holds_pages = inner.calls, inner.holds_pages

    def ask(self, session: Session) -> Prepare | None:
        return self.inner.ask(session)

    def serves(self, request: DistributedUpdateWeightsReq) -> bool:
        return self.inner.serves(request)


@dataclass(frozen=True, slots=True)
class TrainerSide:
    """One trainer rank's side of the transfers to one engine.

    layout     that it has published
    identity   equal for the same shards in the same memory
    shards     in the layout's order
    transfer   names the transfer between both sides
    timeout_s  seconds that any one wait may last
    kept       by the name of a route, what its ends keep from transfer to transfer of this engine
    shared     by the name of a route, what its ends share among all engines of the session
    engines    that are updated at the same time, this one included
    """

    session: Session
    engine: int
    trainer_rank: int
    layout: SourceLayout
    identity: tuple[object, ...]
    shards: Sequence[torch.Tensor]
    transfer: str
    timeout_s: float
    kept: dict[str, Any]
    shared: Mapping[str, Any]
    engines: int = 1


class TrainerEnd(_End):
    """One trainer rank's end of a route to one engine, made as that has asked. It keeps the shards' memory alive.

    writable_bytes  of this rank's memory that engine ranks could write to
    """

    writable_bytes: int = 0

    def connect(self, meeting: Meeting) -> None:
        """Connects to the engine ranks."""

    def offer(self, update: int) -> dict[int, bytes] | None:
        """Returns by engine rank what can be taken instead of all weights; None if the engine needs all."""
        return None

    def start(self, taken: bool) -> None:
        """Sends the weights; with `taken`, what was offered. Returns when all was sent."""

    def commit(self, update: int) -> None:
        """The engine has the weights of `update`. A failure here does not fail an update."""
