"""verl's `CheckpointEngine` for standalone replicas: from trainer memory to live parameters in one hop.

One sync, as verl drives it:

    prepare             trainer rank 0 opens the hub where all meet; a replica's first worker names its life
    build_topology      in the driver: which replicas there are, told to all
    init_process_group  trainer ranks open a session with each new replica and close those of replicas that went
    send_weights        on trainer ranks; trainer rank 0 asks each replica's server to update itself
    receive_weights     on rollout workers: no weights pass through them, they wait for how it ended
    finalize            nothing: plans, handles and connections are kept for the next sync
"""

from __future__ import annotations

import os
import secrets
import sys
from typing import Any

import msgspec
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.control import Address
from sglang_reshard.errors import Unsupported
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq, Failure
from sglang_reshard.trainer.coordinator import Send
from sglang_reshard.verl import server_adapter
from sglang_reshard.verl.meeting import Arrival, Meeting
from sglang_reshard.verl.settings import BACKEND, Settings
from sglang_reshard.verl.trainer import TrainerRank
from sglang_reshard.verl.weights import engine_of, install


class Place(msgspec.Struct, frozen=True):
    """What a worker says of itself in `prepare`.

    address  on trainer rank 0: of the hub
    sync     on trainer rank 0: number of the sync that begins
    replica  on a replica's first worker: the name of its life
    """

    address: Address | None = None
    sync: int = 0
    replica: str = ""


class Topology(msgspec.Struct, frozen=True):
    """Who takes part in one sync. `replica` is a rollout worker's own."""

    address: Address
    sync: int
    replicas: tuple[str, ...]
    replica: str = ""


@CheckpointEngineRegistry.register(BACKEND)
class ReshardCheckpointEngine(CheckpointEngine):
    """One worker's, on either side.

    bucket_size  verl's, for staging whole tensors; not used
    is_master    given to trainer ranks only
    settings     of `engine_kwargs.reshard`, see `Settings`
    """

    wire_format = BACKEND

    def __init__(self, bucket_size: int, is_master: bool | None = None, **settings: Any) -> None:
        self._settings = Settings.of(settings)
        self._is_trainer = is_master is not None
        self._trainer: TrainerRank | None = None
        self._topology: Topology | None = None
        self._meeting: Meeting | None = None
        self._sync = 0
        # A replica that is started anew has new workers, and so another name.
        leads = not self._is_trainer and int(os.environ.get("RANK", "0")) == 0
        self._replica = secrets.token_hex(8) if leads else ""
        if self._is_trainer:
            install()
        # A trainer that hosts no rollout need not import SGLang for it.
        if not self._is_trainer or server_adapter.STOCK_MODULE in sys.modules:
            server_adapter.install()

    def prepare(self) -> dict[str, Any]:
        address = None
        if self._is_trainer:
            self._trainer = self._trainer or TrainerRank(self._settings)
            address = self._trainer.host()
            self._sync += 1
        return msgspec.to_builtins(Place(address, self._sync, self._replica))

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        places = [msgspec.convert(place, Place) for place in metadata]
        trainers, workers = places[:actor_wg_world_size], places[actor_wg_world_size:]
        leader = next((place for place in trainers if place.address is not None), None)
        if leader is None or leader.address is None:
            raise Unsupported("no actor worker is trainer rank 0; were actor workers and rollout workers swapped?")
        owner, owners = "", []
        for place in workers:  # of one replica after the other, its first worker first
            owner = place.replica or owner
            owners.append(owner)
        replicas = tuple(dict.fromkeys(owners))
        topology = Topology(leader.address, leader.sync, replicas)
        told = [msgspec.to_builtins(msgspec.structs.replace(topology, replica=owner)) for owner in owners]
        return {"topology": [msgspec.to_builtins(topology)] * len(trainers)}, {"topology": told}

    def init_process_group(self, **kwargs: Any) -> None:
        """`topology`: this worker's of `build_topology`."""
        self._topology = told = msgspec.convert(kwargs["topology"], Topology)
        if self._meeting is None or self._meeting.address != told.address:
            self._meeting = Meeting(told.address, self._settings.timeout)
        if self._trainer is not None:
            leads = self._trainer.rank == 0
            engines = {name: self._send(self._meeting, name) if leads else None for name in told.replicas}
            self._trainer.attend(told.address, engines)

    def finalize(self) -> None:
        return

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """The metrics of the sync on trainer rank 0; nothing on the others, whose metrics are the same."""
        trainer, topology, meeting = self._trainer, self._topology, self._meeting
        assert trainer is not None
        assert topology is not None
        assert meeting is not None
        failure = None
        try:
            metrics = trainer.update(engine_of(weights), global_steps)
        except BaseException as error:
            failure = Failure.of(error)
            raise
        finally:
            if trainer.rank == 0:
                meeting.say_outcome(topology.sync, topology.replicas, failure)
        return metrics if trainer.rank == 0 else {}

    def receive_weights(self, global_steps: int | None = None) -> Arrival:
        assert self._topology is not None
        assert self._meeting is not None
        return Arrival(self._meeting, self._topology.sync, self._topology.replica, bool(self._replica))

    def _send(self, meeting: Meeting, replica: str) -> Send:
        timeout = self._settings.timeout
        known: list[Send] = []

        def send(request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
            if not known:
                known.append(RemoteEngine(meeting.url_of(replica), timeout_s=timeout).update_weights_distributed)
            return known[0](request)

        return send
