"""Implements verl's `CheckpointEngine` for standalone replicas: from trainer memory directly to live parameters.

The methods of one sync, in the order in which verl calls them:

    prepare             trainer rank 0 starts the control server
    build_topology      in the driver: sends the list of replicas, and where their servers are, to the trainer ranks
    init_process_group  trainer ranks open a session with each new replica, and close those of replicas that left
    send_weights        on trainer ranks; trainer rank 0 requests the update from each replica's server
    receive_weights     on rollout workers: nothing, as no weights pass through them
    finalize            nothing: plans, handles and connections are kept for the next sync
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import msgspec
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from sglang_reshard.control import Address
from sglang_reshard.errors import Unsupported
from sglang_reshard.verl import server_adapter
from sglang_reshard.verl.engine_shards import unsupported_reason
from sglang_reshard.verl.replica_sender import ReplicaSender
from sglang_reshard.verl.replica_weights import LeftOut
from sglang_reshard.verl.settings import BACKEND, Settings
from sglang_reshard.verl.training_engine_weights import engine_of, install

# In the driver: verl's replicas, of the manager that calls `build_topology`.
manager_replicas: ContextVar[Sequence[Any]] = ContextVar("sglang_reshard_replicas", default=())


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker's answer to `prepare`. All but trainer rank 0 have none.

    address   of the control server
    left_out  replicas that do not take part, see `Settings.on_failure`
    """

    address: Address | None = None
    left_out: tuple[str, ...] = ()


class Topology(msgspec.Struct, frozen=True):
    """The participants of one sync, as one worker is told them.

    replicas    the name of each that takes part -> its server's URL. A restarted replica has another name
    left_out    the same, of those that take no part
    is_trainer  whether the worker is a trainer rank
    """

    address: Address
    replicas: dict[str, str]
    left_out: dict[str, str] = {}
    is_trainer: bool = False


@CheckpointEngineRegistry.register(BACKEND)
class ReshardCheckpointEngine(CheckpointEngine):
    """The checkpoint engine of one worker, on either side.

    bucket_size  verl's, for staging whole tensors; not used
    is_master    True on trainer rank 0. A worker that is not given any is a trainer rank or a rollout worker, as the
                 first `build_topology` says: False is the default of verl's engines
    settings     `engine_kwargs.reshard`, see `Settings`
    """

    wire_format = BACKEND

    def __init__(self, bucket_size: int, is_master: bool | None = None, **settings: Any) -> None:
        self._settings = Settings.of(settings)
        self._is_trainer = False
        self._sender: ReplicaSender | None = None
        self._topology: Topology | None = None
        self._servers: dict[str, Any] = {}  # verl's, by the name of their replica
        self._left_out = LeftOut()
        if is_master is not None:
            self._become_trainer()
        # Does not import SGLang into a trainer that hosts no rollout.
        if not self._is_trainer or server_adapter.STOCK_MODULE in sys.modules:
            server_adapter.install()

    def _become_trainer(self) -> None:
        self._is_trainer = True
        install()

    def prepare(self) -> dict[str, Any]:
        address = self._trainer_sender().host() if self._is_trainer else None
        return msgspec.to_builtins(WorkerInfo(address, self._left_out.replicas))

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        infos = [msgspec.convert(info, WorkerInfo) for info in metadata[:actor_wg_world_size]]
        rank0 = next((info for info in infos if info.address is not None), None)
        if rank0 is None or rank0.address is None:
            raise Unsupported(
                "no actor worker is trainer rank 0: pass is_master=(torch.distributed.get_rank() == 0) to the "
                "checkpoint engine of every actor worker, as verl's own do. Or were actor workers and rollout workers "
                "swapped?"
            )
        present = {replica_name(replica): replica for replica in manager_replicas.get()}
        urls = {name: server_url(replica) for name, replica in present.items()}
        left_out = {name: urls.pop(name) for name in rank0.left_out if name in urls}
        topology = Topology(rank0.address, urls, left_out)
        of_trainers = msgspec.to_builtins(msgspec.structs.replace(topology, is_trainer=True))
        servers = {name: replica.server_handle for name, replica in present.items()}
        return (
            {"topology": [of_trainers] * actor_wg_world_size, "servers": [servers] * actor_wg_world_size},
            {"topology": [msgspec.to_builtins(topology)] * rollout_world_size},
        )

    def init_process_group(self, **kwargs: Any) -> None:
        """`topology` and `servers` come from `build_topology`."""
        self._topology = topology = msgspec.convert(kwargs["topology"], Topology)
        self._servers = kwargs.get("servers", {})
        if self._is_trainer and not topology.is_trainer:
            raise Unsupported(
                "this checkpoint engine serves a rollout worker, but was given is_master, which is for actor workers; "
                "leave is_master out there"
            )
        if topology.is_trainer:
            if not self._is_trainer:  # it was not given is_master
                self._become_trainer()
            self._trainer_sender().set_replicas(topology.address, topology.replicas)

    def _trainer_sender(self) -> ReplicaSender:
        if self._sender is None:
            self._sender = ReplicaSender(self._settings)
        return self._sender

    def _joined(self, method: str, *, is_trainer: bool) -> Topology:
        """Returns the sync that `method` takes part in. Raises Unsupported too early, and on the other side."""
        if self._topology is None:
            raise Unsupported(
                f"{method} was called before init_process_group. A sync calls prepare, build_topology and "
                "init_process_group, and then send_weights on actor workers and receive_weights on rollout workers"
            )
        if self._is_trainer != is_trainer:
            side, other = ("actor", "a rollout") if is_trainer else ("rollout", "an actor")
            raise Unsupported(f"{method} is for {side} workers, but this is the checkpoint engine of {other} worker")
        return self._topology

    def finalize(self) -> None:
        return

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Returns the metrics of the sync on trainer rank 0, and an empty dict on the others."""
        topology = self._joined("send_weights", is_trainer=True)
        sender = self._trainer_sender()
        engine = engine_of(weights)
        if reason := unsupported_reason(engine):
            raise Unsupported(f"{reason}; standalone replicas have no fallback")
        metrics = sender.update(engine, global_steps)
        if sender.rank != 0:
            return {}
        if sender.global_steps is not None:
            updated = (self._servers[name] for name in topology.replicas if name not in sender.failed)
            await asyncio.gather(*(server.set_global_steps.remote(sender.global_steps) for server in updated))
        if self._settings.on_failure == "exclude":
            self._left_out.sync_ended(topology.replicas | topology.left_out, sender.failed)
            metrics["reshard/left_out"] = float(len(topology.left_out) + len(sender.failed))
        return metrics

    def receive_weights(self, global_steps: int | None = None) -> None:  # type: ignore[override]
        """Returns None, with which `server_adapter` does nothing: the driver waits for the trainer ranks."""
        self._joined("receive_weights", is_trainer=False)


def replica_name(replica: Any) -> str:
    """Returns a name of verl's replica for errors. A restarted one, which has another actor, has another name."""
    return f"{replica.server_address} ({replica.server_handle._actor_id.hex()[:8]})"


def server_url(replica: Any) -> str:
    return f"http://{replica.server_address}"
