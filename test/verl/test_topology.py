"""Which replicas take part in a sync, out of what the workers say of themselves in `prepare`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from sglang_reshard.control import Address, ControlServer
from sglang_reshard.errors import Unsupported
from sglang_reshard.verl import checkpoint_engine
from sglang_reshard.verl.checkpoint_engine import ReshardCheckpointEngine, Topology, WorkerInfo

ADDRESS = Address("s", "127.0.0.1", 1, "00" * 32)


def said(*infos: WorkerInfo) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(info) for info in infos]


def test_workers_belong_to_the_replica_whose_first_worker_came_before_them() -> None:
    trainers = said(WorkerInfo(ADDRESS, sync=3), WorkerInfo(sync=3))
    workers = said(WorkerInfo(replica="a"), WorkerInfo(), WorkerInfo(replica="b"), WorkerInfo())
    to_trainers, to_workers = ReshardCheckpointEngine.build_topology(2, 4, trainers + workers)
    assert [told["replica"] for told in to_workers["topology"]] == ["a", "a", "b", "b"]
    assert [told["replica"] for told in to_trainers["topology"]] == ["", ""]
    assert [told["is_trainer"] for told in to_trainers["topology"] + to_workers["topology"]] == [True] * 2 + [False] * 4
    for told in to_trainers["topology"] + to_workers["topology"]:
        assert tuple(told["replicas"]) == ("a", "b")
        assert told["sync"] == 3


def test_replicas_that_are_left_out_take_no_part_and_are_told_so() -> None:
    trainers = said(WorkerInfo(ADDRESS, sync=3, left_out=("b", "gone")))
    workers = said(WorkerInfo(replica="a"), WorkerInfo(replica="b"), WorkerInfo())
    to_trainers, to_workers = ReshardCheckpointEngine.build_topology(1, 3, trainers + workers)
    assert [told["replica"] for told in to_workers["topology"]] == ["a", "b", "b"]
    for told in to_trainers["topology"] + to_workers["topology"]:
        assert (tuple(told["replicas"]), tuple(told["left_out"])) == (("a",), ("b",))


def test_no_trainer_rank_0_is_an_error() -> None:
    with pytest.raises(Unsupported, match=r"trainer rank 0: pass is_master=\(torch.distributed.get_rank\(\) == 0\)"):
        ReshardCheckpointEngine.build_topology(1, 1, said(WorkerInfo(), WorkerInfo(replica="a")))


def sent(engine: ReshardCheckpointEngine) -> Any:
    return asyncio.run(engine.send_weights(iter(())))


@pytest.fixture(autouse=True)
def unhooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves verl's classes in this process as they are: nothing here trains or serves."""
    monkeypatch.setattr(checkpoint_engine, "install", lambda: None)
    monkeypatch.setattr(checkpoint_engine.server_adapter, "install", lambda: None)


@pytest.fixture
def topology() -> Iterator[dict[str, Any]]:
    """What a worker is told, of a control server that is there."""
    with contextlib.closing(ControlServer.open()) as server:
        yield msgspec.to_builtins(Topology(server.address, sync=1, replicas=("a",)))


@pytest.mark.parametrize("given", [{}, {"is_master": False}, {"is_master": True}])
def test_a_sync_that_begins_in_the_middle_is_an_error(given: dict[str, bool]) -> None:
    engine = ReshardCheckpointEngine(bucket_size=1, **given)
    with pytest.raises(Unsupported, match="send_weights was called before init_process_group"):
        sent(engine)
    with pytest.raises(Unsupported, match="receive_weights was called before init_process_group"):
        engine.receive_weights()


def test_the_other_side_s_method_is_an_error(topology: dict[str, Any]) -> None:
    worker = ReshardCheckpointEngine(bucket_size=1)
    worker.init_process_group(topology=topology | {"replica": "a"})
    with pytest.raises(Unsupported, match="send_weights is for actor workers"):
        sent(worker)
    assert worker.receive_weights().replica == "a"


def test_a_rollout_worker_that_is_given_is_master_is_an_error(topology: dict[str, Any]) -> None:
    worker = ReshardCheckpointEngine(bucket_size=1, is_master=False)
    with pytest.raises(Unsupported, match="is_master, which is for actor workers"):
        worker.init_process_group(topology=topology | {"replica": "a"})


@pytest.mark.parametrize("given", [{}, {"is_master": False}])
def test_an_actor_worker_without_a_process_group_is_an_error(given: dict[str, bool], topology: dict[str, Any]) -> None:
    trainer = ReshardCheckpointEngine(bucket_size=1, **given)
    with pytest.raises(Unsupported, match="this actor worker has no process group"):
        trainer.init_process_group(topology=topology | {"is_trainer": True})
