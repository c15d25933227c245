"""Which replicas take part in a sync, out of those that verl's manager has and what trainer rank 0 says of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_reshard.control import Address
from sglang_reshard.errors import Unsupported
from sglang_reshard.verl import checkpoint_engine
from sglang_reshard.verl.checkpoint_engine import ReshardCheckpointEngine, Topology, WorkerInfo

ADDRESS = Address("s", "127.0.0.1", 1, "00" * 32)


def said(*infos: WorkerInfo) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(info) for info in infos]


def replica(number: int) -> Any:
    """As much of verl's as is looked at. Its server's actor has the number as its id."""
    handle = SimpleNamespace(_actor_id=number.to_bytes(4, "big"))
    return SimpleNamespace(server_address=f"host:{number}", server_handle=handle)


@pytest.fixture
def replicas() -> Iterator[list[Any]]:
    """Those of the manager that builds a topology."""
    token = checkpoint_engine.manager_replicas.set([replica(1), replica(2)])
    yield list(checkpoint_engine.manager_replicas.get())
    checkpoint_engine.manager_replicas.reset(token)


def test_trainer_ranks_are_told_where_the_servers_of_all_replicas_are(replicas: list[Any]) -> None:
    to_trainers, to_workers = ReshardCheckpointEngine.build_topology(2, 4, said(WorkerInfo(ADDRESS), WorkerInfo()))
    urls = {"host:1 (00000001)": "http://host:1", "host:2 (00000002)": "http://host:2"}
    for told in to_trainers["topology"] + to_workers["topology"]:
        assert (told["replicas"], told["left_out"]) == (urls, {})
    assert [told["is_trainer"] for told in to_trainers["topology"] + to_workers["topology"]] == [True] * 2 + [False] * 4
    assert to_trainers["servers"] == [dict(zip(urls, (r.server_handle for r in replicas), strict=True))] * 2


def test_replicas_that_are_left_out_take_no_part_and_are_told_so(replicas: list[Any]) -> None:
    answers = said(WorkerInfo(ADDRESS, left_out=("host:2 (00000002)", "gone")))
    to_trainers, _ = ReshardCheckpointEngine.build_topology(1, 3, answers)
    (told,) = to_trainers["topology"]
    assert told["replicas"] == {"host:1 (00000001)": "http://host:1"}
    assert told["left_out"] == {"host:2 (00000002)": "http://host:2"}


def test_no_trainer_rank_0_is_an_error() -> None:
    with pytest.raises(Unsupported, match=r"trainer rank 0: pass is_master=\(torch.distributed.get_rank\(\) == 0\)"):
        ReshardCheckpointEngine.build_topology(1, 1, said(WorkerInfo(), WorkerInfo()))


def sent(engine: ReshardCheckpointEngine) -> Any:
    return asyncio.run(engine.send_weights(iter(())))


@pytest.fixture(autouse=True)
def unhooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves verl's classes in this process as they are: nothing here trains or serves."""
    monkeypatch.setattr(checkpoint_engine, "install", lambda: None)
    monkeypatch.setattr(checkpoint_engine.server_adapter, "install", lambda: None)


TOPOLOGY: dict[str, Any] = msgspec.to_builtins(Topology(ADDRESS, replicas={"a": "http://a"}))


@pytest.mark.parametrize("given", [{}, {"is_master": False}, {"is_master": True}])
def test_a_sync_that_begins_in_the_middle_is_an_error(given: dict[str, bool]) -> None:
    engine = ReshardCheckpointEngine(bucket_size=1, **given)
    with pytest.raises(Unsupported, match="send_weights was called before init_process_group"):
        sent(engine)
    with pytest.raises(Unsupported, match="receive_weights was called before init_process_group"):
        engine.receive_weights()


def test_the_other_side_s_method_is_an_error() -> None:
    worker = ReshardCheckpointEngine(bucket_size=1)
    worker.init_process_group(topology=TOPOLOGY)
    with pytest.raises(Unsupported, match="send_weights is for actor workers"):
        sent(worker)
    worker.receive_weights()


def test_a_rollout_worker_that_is_given_is_master_is_an_error() -> None:
    worker = ReshardCheckpointEngine(bucket_size=1, is_master=False)
    with pytest.raises(Unsupported, match="is_master, which is for actor workers"):
        worker.init_process_group(topology=TOPOLOGY)


@pytest.mark.parametrize("given", [{}, {"is_master": False}])
def test_an_actor_worker_without_a_process_group_is_an_error(given: dict[str, bool]) -> None:
    trainer = ReshardCheckpointEngine(bucket_size=1, **given)
    with pytest.raises(Unsupported, match="this actor worker has no process group"):
        trainer.init_process_group(topology=TOPOLOGY | {"is_trainer": True})
