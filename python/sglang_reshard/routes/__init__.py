"""Ways by which weights get from trainer ranks to engine ranks: a file or a folder for each, with both of its ends.

A route is chosen by its name. Its module is imported when it is chosen, so that nobody runs, or needs the packages of,
a route that is not used:

    ipc        engine ranks read trainer memory of their host, which they map by handle
    p2p        trainer ranks send exactly the elements that engine ranks lack
    ipc+p2p    ipc where memory can be mapped, p2p from the other trainer ranks
    nixl       engine ranks read registered memory of any host
    broadcast  groups of engine ranks read whole shards once, and broadcast them

Others go around one of these. `delta` lets trainer ranks offer what has changed instead, `relay` lets engines pass on
to each other what one of them has read:

    delta(p2p), delta(ipc+p2p), delta(nixl), relay(nixl), delta(relay(nixl))

`base` has the interface, `wire` the process groups over which messages travel.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_reshard.protocol.messages import Prepare
    from sglang_reshard.routes.base import EngineEnd, EngineSide, TrainerEnd, TrainerSide
    from sglang_reshard.routes.choice import Strategy
    from sglang_reshard.trainer.coordinator import SenderConfig

# Module and class of an engine rank's end, by the strategy's name.
_ENGINE_ENDS = {
    "ipc": ("ipc", "IpcEngineEnd"),
    "p2p": ("p2p.engine", "P2pEngineEnd"),
    "ipc+p2p": ("p2p.engine", "P2pEngineEnd"),
    "nixl": ("nixl.engine", "NixlEngineEnd"),
    "broadcast": ("broadcast.engine", "BroadcastEngineEnd"),
}
# Of an engine rank's end around another, by the option of the request; from the innermost.
_AROUND = {"relay": ("relay.engine", "RelayEngineEnd"), "delta": ("delta.engine", "DeltaEngineEnd")}
# Of a trainer rank's end, by the name in `Prepare`. The other routes need none.
_TRAINER_ENDS = {
    "p2p": ("p2p.trainer", "P2pTrainerEnd"),
    "nixl": ("nixl.trainer", "NixlTrainerEnd"),
    "delta": ("delta.trainer", "DeltaTrainerEnd"),
}


def engine_end(side: EngineSide, strategy: Strategy) -> EngineEnd:
    """Returns an engine rank's end of the route that was chosen, within those that the request has around it."""
    end: EngineEnd = _named(_ENGINE_ENDS[strategy.name])(side, strategy)
    for name in (name for name in _AROUND if name in side.options):
        end = _named(_AROUND[name])(side, strategy, end)
    return end


def trainer_end(side: TrainerSide, command: Prepare) -> TrainerEnd:
    """Returns the trainer rank's end that an engine asks for. Raises Mismatch for a name that does not exist."""
    if command.route not in _TRAINER_ENDS:
        from sglang_reshard.errors import Mismatch

        raise Mismatch(
            f"invalid command of engine rank 0: no route is called {command.route[:40]!r}. Do both sides run the same "
            "version of sglang-reshard?"
        )
    end: TrainerEnd = _named(_TRAINER_ENDS[command.route])(side, command)
    return end


def options_around(config: SenderConfig) -> dict[str, bytes]:
    """Returns what a sender asks of the routes around the transport, for its requests."""
    return {"delta": b""} if config.delta == "auto" else {}


def shared_state(config: SenderConfig) -> dict[str, Any]:
    """Returns what the ends of one trainer rank share among all engines of its session, see `TrainerSide.shared`."""
    return {"delta": _named(("delta.trainer", "DeltaSources"))(config.delta_device)} if config.delta == "auto" else {}


def _named(where: tuple[str, str]) -> Any:
    module, name = where
    return getattr(import_module(f"{__name__}.{module}"), name)
