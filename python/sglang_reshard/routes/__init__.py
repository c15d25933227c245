"""The ways to bring weights from trainer ranks to engine ranks: a file or a folder for each, with both of its ends.

A route is chosen by its name. Its module is imported when it is chosen, so that nobody runs, or needs the packages of,
a route that is not used:

    ipc        engine ranks read trainer memory of their host, which they map by handle
    p2p        trainer ranks send exactly the elements that engine ranks lack
    ipc+p2p    ipc where memory can be mapped, p2p from the other trainer ranks
    nixl       engine ranks read registered memory of any host
    broadcast  groups of engine ranks read whole shards once, and broadcast them
    disk       engine ranks read the files of a snapshot; a server asks for it, and no sender

Others go around one of these. `delta` lets trainer ranks offer what has changed instead, `relay` lets engines pass on
to each other what one of them has read:

    delta(p2p), delta(ipc+p2p), delta(nixl), relay(nixl), delta(relay(nixl))

The module of a route has

    plan(index, demands, topology, bucket_bytes) -> Strategy   pure; raises Unsupported, naming ranks and hosts
    engine_end(side, strategy) -> EngineEnd                    of one around another: (side, strategy, inner)
    trainer_end(side, command) -> TrainerEnd                   if trainer ranks take part

`route_table` has the names, `base` the interface of the ends, `wire` the process groups over which messages travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.plan import ClusterTopology, RankDemand, TensorIndex
from sglang_reshard.protocol.validation import check_transport
from sglang_reshard.route_table import AROUND, FROM_FILES, ROUTES
from sglang_reshard.routes.strategy import Strategy, demanded_bytes, first_unread

if TYPE_CHECKING:
    from sglang_reshard.protocol.messages import Prepare
    from sglang_reshard.routes.base import EngineEnd, EngineSide, TrainerEnd, TrainerSide
    from sglang_reshard.trainer.options import SenderOptions


def route_module(name: str) -> ModuleType:
    """Returns the module of a route. Its `plan` is called on every engine rank, and makes the same of the same."""
    return import_module((ROUTES | FROM_FILES | AROUND)[name])


def choose_strategy(
    transport: str,
    index: TensorIndex,
    demands: Sequence[RankDemand],
    topology: ClusterTopology,
    bucket_bytes: int,
) -> Strategy:
    """Chooses the strategy for engine ranks with these demands; every rank that calls it gets the same.

    Raises Mismatch for an unknown transport, and Unsupported, naming ranks and hosts, for an infeasible one.
    """
    check_transport(transport, of_request=True)
    if transport == "auto":
        return _read_or_send(index, demands, topology, bucket_bytes)
    strategy: Strategy = route_module(transport).plan(index, demands, topology, bucket_bytes)
    return strategy


def _read_or_send(
    index: TensorIndex, demands: Sequence[RankDemand], topology: ClusterTopology, bucket_bytes: int
) -> Strategy:
    """Returns what `auto` chooses: engine ranks read all memory they can, and trainer ranks send the rest.

    Where NCCL would not connect the ranks for that, weights are broadcast, if that can be done.
    """
    read, unread = demanded_bytes(demands, topology)
    if not unread.any():
        return Strategy("ipc", "auto: engine ranks read memory of their own hosts", unread)
    why = first_unread(unread, topology)
    name, reads = ("ipc+p2p", "what they can") if read.any() else ("p2p", "nothing")
    try:
        reason = f"auto: engine ranks read {reads}; {why}"
        strategy: Strategy = route_module("p2p").send(name, reason, unread, topology, bucket_bytes)
        return strategy
    except Unsupported as refusal:
        unsent = refusal
    try:
        reason = f"auto: not {name}: {unsent.problem}"
        strategy = route_module("broadcast").plan(index, demands, topology, bucket_bytes, reason)
        return strategy
    except Unsupported:
        raise Unsupported(f"{why}. Nor can weights be sent: {unsent.problem}", cure=unsent.cure) from None


def engine_end(side: EngineSide, strategy: Strategy) -> EngineEnd:
    """Returns an engine rank's end of the route that was chosen, within those that the request has around it."""
    innermost = strategy.name.rpartition("+")[2]  # "ipc+p2p" reads what it can, and is sent the rest
    end: EngineEnd = route_module(innermost).engine_end(side, strategy)
    for name in (name for name in AROUND if name in side.request.around):
        end = route_module(name).engine_end(side, strategy, end)
    return end


def trainer_end(side: TrainerSide, command: Prepare) -> TrainerEnd:
    """Returns the trainer rank's end that an engine asks for. Raises Mismatch for a name that does not exist."""
    if command.route not in ROUTES and command.route not in AROUND:
        raise Mismatch(
            f"invalid command of engine rank 0: no route is called {command.route[:40]!r}. Do both sides run the same "
            "version of sglang-reshard?"
        )
    end: TrainerEnd = route_module(command.route).trainer_end(side, command)
    return end


def options_around(options: SenderOptions) -> dict[str, bytes]:
    """Returns what a sender asks of the routes around the transport, for its requests."""
    return {"delta": b""} if options.delta == "auto" else {}


def shared_state(options: SenderOptions) -> dict[str, Any]:
    """Returns what the ends of one trainer rank share among all engines of its session, see `TrainerSide.shared`."""
    if options.delta != "auto":
        return {}
    from sglang_reshard.routes.delta.trainer import DeltaSources

    return {"delta": DeltaSources(options.delta_device)}
