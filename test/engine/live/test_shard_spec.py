"""verl's own ShardSpec, as its training engines export it, is read like the DTensor it was made from."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from sglang_reshard.sources import describe

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(0), Shard(1))])
@pytest.mark.parametrize("rank", range(6))
def test_a_shard_spec_describes_what_its_dtensor_describes(placements: tuple[object, ...], rank: int) -> None:
    from verl.workers.engine.spec import ShardSpec

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
    try:
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("fsdp", "tp"))
        tensor = distribute_tensor(torch.arange(35.0).view(7, 5), mesh, placements, src_data_rank=None)
        ranks = {"trainer_rank": rank, "global_ranks": tuple(range(6))}
        flat = tensor.to_local().reshape(-1)
        by_spec = describe([("w", flat, ShardSpec.from_param(tensor))], **ranks)
        by_dtensor = describe([("w", tensor)], **ranks)
    finally:
        dist.destroy_process_group()
    assert by_spec.layout == by_dtensor.layout
    assert torch.equal(by_spec.shards[0], by_dtensor.shards[0])
