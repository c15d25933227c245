"""Which replicas take part in a sync, out of what the workers say of themselves in `prepare`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang_reshard.control import Address
from sglang_reshard.errors import Unsupported
from sglang_reshard.verl.checkpoint_engine import ReshardCheckpointEngine, WorkerInfo

ADDRESS = Address("s", "127.0.0.1", 1, "00" * 32)


def said(*infos: WorkerInfo) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(info) for info in infos]


def test_workers_belong_to_the_replica_whose_first_worker_came_before_them() -> None:
    trainers = said(WorkerInfo(ADDRESS, sync=3), WorkerInfo(sync=3))
    workers = said(WorkerInfo(replica="a"), WorkerInfo(), WorkerInfo(replica="b"), WorkerInfo())
    to_trainers, to_workers = ReshardCheckpointEngine.build_topology(2, 4, trainers + workers)
    assert [told["replica"] for told in to_workers["topology"]] == ["a", "a", "b", "b"]
    assert [told["replica"] for told in to_trainers["topology"]] == ["", ""]
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
    with pytest.raises(Unsupported, match="trainer rank 0"):
        ReshardCheckpointEngine.build_topology(1, 1, said(WorkerInfo(), WorkerInfo(replica="a")))
