"""Layouts of meshes: parts of a mesh, ranks outside of the update, local bytes."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.sources import describe


@contextlib.contextmanager
def as_rank(rank, size):
    """Runs as one rank of a world, with a fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def as_dtensor(mesh):
    return (distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)], src_data_rank=None),)


def with_a_shard_spec(mesh):
    return torch.zeros(4), SimpleNamespace(full_shape=(4, 2), mesh=mesh, placements=(Shard(0),))


@pytest.mark.parametrize("given", [as_dtensor, with_a_shard_spec])
def test_a_tensor_on_the_tp_part_of_a_mesh_is_replicated_over_the_rest(given):
    layouts = []
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            state = describe([("w", *given(mesh["tp"]))], trainer_rank=rank, global_ranks=(0, 1, 2, 3))
            assert state.shards[0].shape == (2, 2)
            layouts.append(state.layout)
    assert all(layout == layouts[0] for layout in layouts)
    shards = layouts[0].shard_map(layouts[0].tensors[0]).shards
    assert [(p.box.start, p.ranks) for p in shards] == [((0, 0), (0, 2)), ((2, 0), (1, 3))]


def test_a_mesh_with_ranks_outside_the_update_is_refused():
    with as_rank(0, 4):
        mesh = DeviceMesh("cpu", torch.arange(4))
        sharded = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)], src_data_rank=None)
        with pytest.raises(Unsupported, match="hold only 4 of its 8 elements"):
            describe([("w", sharded)], trainer_rank=0, global_ranks=(0, 1))


def test_a_name_passed_twice_and_no_tensors_are_refused():
    with as_rank(0, 1):
        with pytest.raises(Mismatch, match="passed twice"):
            describe([("w", torch.zeros(1)), ("w", torch.zeros(1))], trainer_rank=0, global_ranks=(0,))
        with pytest.raises(Mismatch, match="no tensors"):
            describe([], trainer_rank=0, global_ranks=(0,))


def test_local_bytes_are_those_of_the_local_tensors():
    shapes = [(7, 3), (7, 3), (2, 5), (1,), (4, 4)]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.int8, torch.float64]
    held, told = [], []
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            ways = [[Shard(0), Shard(1)], [Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(0), Replicate()]]
            tensors = [
                distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, way, src_data_rank=None)
                for shape, dtype, way in zip(shapes, dtypes, ways, strict=False)
            ]
            tensors.append(torch.zeros(shapes[-1], dtype=dtypes[-1]))
            named = [(str(i), tensor) for i, tensor in enumerate(tensors)]
            told.append(describe(named, trainer_rank=rank, global_ranks=(0, 1, 2, 3)).layout.local_bytes())
            locals_ = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
            held.append(sum(local.numel() * local.element_size() for local in locals_))
    assert told == [tuple(held)] * 4
    assert len(set(held)) > 1
