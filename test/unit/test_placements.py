"""Shard maps and local shapes of meshes and placements, against torch's own DTensor."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.source_layout import compute_local_shapes, compute_shard_map, in_order_of_strides
from sglang_reshard.sources import Mesh, Placement, describe
from support.sweep import examples


@contextlib.contextmanager
def as_rank(rank, size):
    """Runs as one rank of a world, with a fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def assembled(held, rank, tensor):
    """Returns a rank's local tensor, cut from the whole tensor by its shards."""
    local = torch.full(held.min_local_shape(rank) or (0,) * tensor.dim(), -1, dtype=tensor.dtype)
    for shard in held.shards:
        if rank in shard.ranks:
            stop = (a + n for a, n in zip(shard.local_start, shard.box.shape, strict=True))
            local[tuple(slice(a, b) for a, b in zip(shard.local_start, stop, strict=True))] = tensor[shard.box.slices()]
    return local


@st.composite
def layouts(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    dims = st.sampled_from(range(len(shape)))
    placements = tuple(draw(st.one_of(st.just(Replicate()), dims.map(Shard))) for _ in mesh_shape)
    return shape, mesh_shape, placements


def world_of(mesh_shape):
    return torch.Size(mesh_shape).numel()


def ours(p):
    if isinstance(p, Replicate):
        return Placement()
    return Placement(p.dim, getattr(p, "split_factor", 1))


def check_against_torch(shape, mesh_shape, placements):
    world = world_of(mesh_shape)
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    mesh = Mesh(mesh_shape, tuple(range(world)))
    of_mesh = shape, *in_order_of_strides(mesh, tuple(map(ours, placements)))
    held, shapes = compute_shard_map(*of_mesh), compute_local_shapes(*of_mesh)
    for rank in range(world):
        with as_rank(rank, world):
            device_mesh = DeviceMesh("cpu", torch.arange(world).view(mesh_shape))
            local = distribute_tensor(tensor, device_mesh, placements, src_data_rank=None).to_local()
        if local.numel():
            assert torch.equal(assembled(held, rank, tensor), local), (shape, mesh_shape, placements, rank)
            assert shapes[rank] == held.min_local_shape(rank) == tuple(local.shape)
        else:
            assert torch.Size(shapes[rank]).numel() == 0
            assert held.min_local_shape(rank) is None


@settings(max_examples=examples(60))
@given(layouts())
def test_shard_and_replicate_as_distribute_tensor_does(layout):
    check_against_torch(*layout)


def test_a_tensor_on_the_tp_part_of_a_mesh_is_replicated_over_the_rest():
    descriptions = []
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            tensor = distribute_tensor(torch.arange(8.0), mesh["tp"], [Shard(0)], src_data_rank=None)
            descriptions.append(describe([("w", tensor)], trainer_rank=rank, global_ranks=(0, 1, 2, 3)).layout)
    assert all(d == descriptions[0] for d in descriptions)
    shards = descriptions[0].shard_map(descriptions[0].tensors[0]).shards
    assert [(p.box.start, p.ranks) for p in shards] == [((0,), (0, 2)), ((4,), (1, 3))]


def test_a_shard_spec_on_the_tp_part_of_a_mesh_is_replicated_over_the_rest():
    layouts = []
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            spec = SimpleNamespace(full_shape=(4, 2), mesh=mesh["tp"], placements=(Shard(0),))
            state = describe([("w", torch.zeros(4), spec)], trainer_rank=rank, global_ranks=(0, 1, 2, 3))
            assert state.shards[0].shape == (2, 2)
            layouts.append(state.layout)
    assert all(layout == layouts[0] for layout in layouts)
    assert [p.ranks for p in layouts[0].shard_map(layouts[0].tensors[0]).shards] == [(0, 2), (1, 3)]


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
