"""Implements verl's `CheckpointEngine` for standalone replicas: from trainer memory directly to live parameters.

The methods of one sync, in the order in which verl calls them:

    prepare             trainer rank 0 starts the control server; a replica's first worker generates the replica's name
    build_topology      in the driver: sends the list of replicas to all workers
    init_process_group  trainer ranks open a session with each new replica, and close those of replicas that left
    send_weights        on trainer ranks; trainer rank 0 requests the update from each replica's server
    receive_weights     on rollout workers: no weights pass through them, they wait for the outcome
    finalize            nothing: plans, handles and connections are kept for the next sync
"""

from __future__ import annotations

import functools
import os
import secrets
import sys
from typing import Any

import msgspec
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.control import Address
from sglang_reshard.errors import Unsupported
from sglang_reshard.protocol.messages import Failure
from sglang_reshard.trainer.coordinator import Send
from sglang_reshard.verl import server_adapter
from sglang_reshard.verl.engine_shards import unsupported_reason
from sglang_reshard.verl.replica_sender import ReplicaSender
from sglang_reshard.verl.replica_weights import LeftOut
from sglang_reshard.verl.settings import BACKEND, Settings
from sglang_reshard.verl.sync_channel import PendingSync, SyncChannel
from sglang_reshard.verl.training_engine_weights import engine_of, install


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker's answer to `prepare`.

    address  on trainer rank 0: of the control server
    sync     on trainer rank 0: number of the sync that begins
    replica  on a replica's first worker: the replica's name, which changes when it is restarted
    left_out  on trainer rank 0: replicas that do not take part, see `Settings.on_failure`
    """

    address: Address | None = None
    sync: int = 0
    replica: str = ""
    left_out: tuple[str, ...] = ()


class Topology(msgspec.Struct, frozen=True):
    """The participants of one sync, as one worker is told them.

    replica     the one that a rollout worker belongs to
    left_out    replicas that take no part
    is_trainer  whether the worker is a trainer rank
    """

    address: Address
    sync: int
    replicas: tuple[str, ...]
    replica: str = ""
    left_out: tuple[str, ...] = ()
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
        self._channel: SyncChannel | None = None
        self._sync = 0
        self._left_out = LeftOut()
        # A restarted replica has new workers, and therefore another name.
        is_first = is_master is None and int(os.environ.get("RANK", "0")) == 0
        self._replica = secrets.token_hex(8) if is_first else ""
        if is_master is not None:
            self._become_trainer()
        # Does not import SGLang into a trainer that hosts no rollout.
        if not self._is_trainer or server_adapter.STOCK_MODULE in sys.modules:
            server_adapter.install()

    def _become_trainer(self) -> None:
        self._is_trainer, self._replica = True, ""
        install()

    def prepare(self) -> dict[str, Any]:
        address = None
        if self._is_trainer:
            address = self._trainer_sender().host()
            self._sync += 1
        return msgspec.to_builtins(WorkerInfo(address, self._sync, self._replica, self._left_out.replicas))

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        infos = [msgspec.convert(info, WorkerInfo) for info in metadata]
        trainers, workers = infos[:actor_wg_world_size], infos[actor_wg_world_size:]
        rank0 = next((info for info in trainers if info.address is not None), None)
        if rank0 is None or rank0.address is None:
            raise Unsupported(
                "no actor worker is trainer rank 0: pass is_master=(torch.distributed.get_rank() == 0) to the "
                "checkpoint engine of every actor worker, as verl's own do. Or were actor workers and rollout workers "
                "swapped?"
            )
        replica, replica_of = "", []
        for info in workers:  # one replica after the other, each with its first worker first
            replica = info.replica or replica
            replica_of.append(replica)
        present = dict.fromkeys(replica_of)
        left_out = tuple(name for name in present if name in rank0.left_out)
        taking_part = tuple(name for name in present if name not in left_out)
        topology = Topology(rank0.address, rank0.sync, taking_part, left_out=left_out)
        own = [msgspec.to_builtins(msgspec.structs.replace(topology, replica=replica)) for replica in replica_of]
        of_trainers = msgspec.to_builtins(msgspec.structs.replace(topology, is_trainer=True))
        return {"topology": [of_trainers] * len(trainers)}, {"topology": own}

    def init_process_group(self, **kwargs: Any) -> None:
        """`topology` is the return value of `build_topology` for this worker."""
        self._topology = topology = msgspec.convert(kwargs["topology"], Topology)
        if topology.is_trainer != self._is_trainer:
            self._change_side(topology)
        if self._channel is None or self._channel.address != topology.address:
            self._channel = SyncChannel(topology.address, self._settings.sender.timeout_s)
        if self._is_trainer:
            sender, channel = self._trainer_sender(), self._channel
            sends = {name: self._send_to(channel, name) if sender.rank == 0 else None for name in topology.replicas}
            sender.set_replicas(topology.address, sends)

    def _change_side(self, topology: Topology) -> None:
        """Makes a worker that was not given `is_master` a trainer rank. Raises Unsupported for any other change."""
        if self._is_trainer:
            raise Unsupported(
                "this checkpoint engine serves a rollout worker, but was given is_master, which is for actor workers; "
                "leave is_master out there"
            )
        self._become_trainer()
        self._sync = topology.sync

    def _trainer_sender(self) -> ReplicaSender:
        if self._sender is None:
            self._sender = ReplicaSender(self._settings)
        return self._sender

    def _joined(self, method: str, *, is_trainer: bool) -> tuple[Topology, SyncChannel]:
        """Returns the sync that `method` takes part in. Raises Unsupported too early, and on the other side."""
        if self._topology is None or self._channel is None:
            raise Unsupported(
                f"{method} was called before init_process_group. A sync calls prepare, build_topology and "
                "init_process_group, and then send_weights on actor workers and receive_weights on rollout workers"
            )
        if self._is_trainer != is_trainer:
            side, other = ("actor", "a rollout") if is_trainer else ("rollout", "an actor")
            raise Unsupported(f"{method} is for {side} workers, but this is the checkpoint engine of {other} worker")
        return self._topology, self._channel

    def finalize(self) -> None:
        return

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Returns the metrics of the sync on trainer rank 0, and an empty dict on the others."""
        topology, channel = self._joined("send_weights", is_trainer=True)
        sender = self._trainer_sender()
        failure = None
        try:
            engine = engine_of(weights)
            if reason := unsupported_reason(engine):
                raise Unsupported(f"{reason}; standalone replicas have no fallback")
            metrics = sender.update(engine, global_steps)
        except BaseException as error:
            failure = Failure.of(error)
            raise
        finally:
            if sender.rank == 0:
                replicas = topology.replicas + topology.left_out
                channel.put_outcome(topology.sync, replicas, failure, sender.global_steps)
        if sender.rank != 0:
            return {}
        if self._settings.on_failure == "exclude":
            self._left_out.sync_ended(topology.replicas + topology.left_out, sender.failed, channel.get_server_url)
            metrics["reshard/left_out"] = float(len(topology.left_out) + len(sender.failed))
        return metrics

    def receive_weights(self, global_steps: int | None = None) -> PendingSync:
        topology, channel = self._joined("receive_weights", is_trainer=False)
        return PendingSync(channel, topology.sync, topology.replica, bool(self._replica))

    def _send_to(self, channel: SyncChannel, replica: str) -> Send:
        timeout = self._settings.sender.timeout_s
        engine = functools.cache(lambda: RemoteEngine(channel.get_server_url(replica), timeout_s=timeout))
        return lambda request: engine().update_weights_distributed(request)
