"""Fused tensors: the views of all ranks together are the checkpoint tensors, with any placements."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.decoders import pack_blob, unpack_blob
from sglang_reshard.layout.regions import Box, Region
from sglang_reshard.layout.shard_map import invalid_reason
from sglang_reshard.layout.source_layout import compute_shard_map
from sglang_reshard.sources import (
    ExplicitSharding,
    FusedSlice,
    FusedTensor,
    Mesh,
    Placement,
    ShardMap,
    SourceLayout,
    blocks,
    describe,
    fused,
    slice_of,
)
from support.dtensors import as_rank
from support.sweep import examples

EXPERTS, INNER, HIDDEN = 6, 4, 10


# -- any slices of any fused tensor


@st.composite
def parts_of(draw, shape):
    start, stop = zip(*(sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in shape), strict=True)
    stop = tuple(max(a, b) if a < n else b for a, b, n in zip(start, stop, shape, strict=True))
    gone = [axis for axis in range(len(shape)) if stop[axis] - start[axis] == 1 and draw(st.booleans())]
    return FusedSlice(start, stop, tuple(draw(st.permutations([a for a in range(len(shape)) if a not in gone]))))


@st.composite
def jobs(draw):
    shape = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=4)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    dims = [draw(st.integers(-1, len(shape) - 1)) for _ in mesh_shape]
    placements = tuple(Placement(d) for d in dims)
    if len(dims) == 2 and dims[0] == dims[1] >= 0 and draw(st.booleans()):
        placements = Placement(dims[0], mesh_shape[1]), placements[1]
    ranks = draw(st.permutations(range(math.prod(mesh_shape))))
    return shape, Mesh(mesh_shape, tuple(ranks)), placements, [draw(parts_of(shape)) for _ in range(3)]


def box_of(part, tensor):
    """Returns the slice, by indexing."""
    gone = {axis for axis in range(tensor.dim()) if axis not in part.axes}
    bounds = zip(part.start, part.stop, strict=True)
    box = tensor[tuple(a if axis in gone else slice(a, b) for axis, (a, b) in enumerate(bounds))]
    kept = sorted(part.axes)
    return box.permute([kept.index(axis) for axis in part.axes])


def assembled(held, rank, tensor):
    """Returns a rank's local tensor, cut from the whole tensor by its shards."""
    local = torch.full(held.min_local_shape(rank) or (0,) * tensor.dim(), -1, dtype=tensor.dtype)
    for shard in held.shards:
        if rank in shard.ranks:
            stop = (a + n for a, n in zip(shard.local_start, shard.box.shape, strict=True))
            local[tuple(slice(a, b) for a, b in zip(shard.local_start, stop, strict=True))] = tensor[shard.box.slices()]
    return local


@settings(max_examples=examples(300))
@given(jobs())
def test_every_ranks_view_is_its_shards_and_all_views_are_the_slice(job):
    shape, mesh, placements, parts = job
    whole = torch.arange(math.prod(shape)).view(shape)
    held = compute_shard_map(shape, mesh, placements)
    named = tuple((str(i), part) for i, part in enumerate(parts))
    told = []
    for rank in range(len(mesh.ranks)):
        local = assembled(held, rank, whole)
        members = list(fused.split_fused("w", named, shape, held, local, rank))
        told.append([(m.name, m.shape, m.sharding) for m in members])
        for member, part in zip(members, parts, strict=True):
            expected = box_of(part, whole)
            assert member.shape == tuple(expected.shape)
            own = member.sharding.shards_of(rank)
            for shard in own:
                inside = member.sharding.to_local(shard, Region.of(shard.box))
                assert torch.equal(inside.view(member.tensor), expected[shard.box.slices()])
            assert tuple(member.tensor.shape) == (member.sharding.min_local_shape(rank) if own else (0,))
            if own:
                assert member.tensor.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
            assert invalid_reason(member.shape, member.sharding, len(mesh.ranks)) == ""
            assert member.sharding.covered_elements() == expected.numel()
    assert all(of_rank == told[0] for of_rank in told), "the same on every trainer rank"


@given(st.data())
def test_a_view_of_a_meta_tensor_tells_its_slice(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    part = data.draw(parts_of(shape).filter(lambda part: math.prod(part.shape) > 0))
    found = slice_of(box_of(part, torch.empty(shape, dtype=torch.bfloat16, device="meta")), shape)
    assert (found.start, found.stop) == (part.start, part.stop)
    whole = torch.arange(math.prod(shape)).view(shape)
    assert torch.equal(box_of(found, whole), box_of(part, whole))


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.flatten(), lambda w: w[:, ::2], lambda w: w[:1].clone(), lambda w: w[0, :1].expand(3, 5),
        lambda w: w.view(2, 2, 2, 5), lambda w: w.view(torch.int8), lambda w: w[:0], lambda w: w[:1, ..., None, None],
    ],
)  # fmt: skip
def test_views_that_are_not_boxes_are_refused(view):
    whole = torch.empty(2, 4, 5, dtype=torch.bfloat16, device="meta")
    with pytest.raises(Unsupported, match=r"not a box of a tensor of shape \(2, 4, 5\)"):
        slice_of(view(whole), (2, 4, 5))


# -- experts, as trainers pass them


def test_a_fused_layout_is_as_small_on_the_wire_as_one_of_separate_experts():
    """Qwen3-30B-A3B's 48 layers of 128 experts on 64 trainer ranks: the names are what takes room."""
    shape = (128, 8, 4)
    parts = [FusedSlice((e, a, 0), (e + 1, a + 4, 4), (1, 2)) for e in range(128) for a in (0, 4)]
    named, separate = [], []
    with as_rank(0, 64):
        mesh = init_device_mesh("cpu", (64,))
        local = torch.zeros(2, *shape[1:], dtype=torch.bfloat16)
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        expert = DTensor.from_local(local[0, :1], mesh, [Shard(0)], run_check=False)
        for layer in range(48):
            at = f"model.layers.{layer}.mlp.experts"
            names = [f"{at}.{e}.{name}_proj.weight" for e in range(128) for name in ("gate", "up")]
            named.append((f"stack.{layer}", tensor, FusedTensor(tuple(zip(names, parts, strict=True)))))
            separate += [(name, expert) for name in names]
        ranks = {"trainer_rank": 0, "global_ranks": tuple(range(64))}
        layout, apart = (describe(given, **ranks).layout for given in (named, separate))
    _, blob = pack_blob(layout)
    assert len(layout.explicit) == 64
    assert len(blob) < 1.5 * len(pack_blob(apart)[1]) < 100_000
    assert unpack_blob(blob, SourceLayout) == layout


def test_a_flat_shard_with_a_spec_can_be_fused_too():
    """As verl exports fused tensors: by mesh and placements, or as explicit blocks."""
    whole = torch.randn(EXPERTS, HIDDEN, INNER)
    slices = tuple((f"{e}.down", FusedSlice((e, 0, 0), (e + 1, HIDDEN, INNER), (1, 2))) for e in range(EXPERTS))
    boxes = [Box((0, 0, 0), (2, HIDDEN, INNER)), Box((2, 0, 0), (6, HIDDEN, INNER)), None]
    for rank, box in enumerate(boxes):
        with as_rank(rank, 3):
            local = whole[box.slices()].flatten() if box else torch.empty(0)
            given = [("down", local, FusedTensor(slices, blocks(whole.shape, boxes)))]
            state = describe(given, trainer_rank=rank, global_ranks=(0, 1, 2))
        for e, shard in enumerate(state.shards):
            mine = box is not None and box.start[0] <= e < box.stop[0]
            assert torch.equal(shard, whole[e]) if mine else shard.numel() == 0
        holders = [p.ranks for t in state.layout.tensors for p in state.layout.shard_map(t).shards]
        assert holders == [(0,)] * 2 + [(1,)] * 4


def test_the_dtype_is_the_fused_tensors_also_on_a_rank_that_holds_nothing():
    with as_rank(0, 2):
        mesh = dist.device_mesh.DeviceMesh("cpu", [1])
        tensor = DTensor.from_local(
            torch.empty(0), mesh, [Shard(0)], run_check=False, shape=torch.Size((2, 3)), stride=(3, 1)
        )
        tensor = tensor.to(torch.bfloat16)
        stack = FusedTensor((("a", FusedSlice((0, 0), (1, 3), (1,))), ("b", FusedSlice((1, 0), (2, 3), (1,)))))
        state = describe([("w", tensor, stack)], trainer_rank=0, global_ranks=(0, 1))
    assert [(t.dtype, t.shape) for t in state.layout.tensors] == [("bfloat16", (3,))] * 2
    assert [shard.numel() for shard in state.shards] == [0, 0]


def test_between_forward_and_backward_slices_are_those_of_the_sharded_parameter():
    with as_rank(1, 2):
        model = torch.nn.Linear(3, 4, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        sharded = model.weight
        model(torch.ones(1, 3))
        assert not isinstance(model.weight, DTensor), "FSDP2 leaves its root unsharded"
        stack = FusedTensor(tuple((str(i), FusedSlice((i, 0), (i + 1, 3), (1,))) for i in range(4)))
        state = describe([("w", model.weight, stack)], trainer_rank=1, global_ranks=(0, 1))
    assert state.inputs[0].data_ptr() == sharded._local_tensor.data_ptr()
    assert [shard.numel() for shard in state.shards] == [0, 0, 3, 3]


# -- mistakes


def refused(parts, kind, says, tensor=None, spec=None):
    tensor = torch.zeros(2, 3) if tensor is None else tensor
    with as_rank(1, 2), pytest.raises(kind, match=says) as caught:
        describe([("w", tensor, FusedTensor(tuple(parts), spec))], trainer_rank=1, global_ranks=(0, 1))
    assert str(caught.value).startswith("trainer rank 1: ")


def test_invalid_slices_are_refused_by_name():
    refused([("a", FusedSlice((0, 0), (2, 4), (0, 1)))], Mismatch, r"w: its slice a exceeds shape \(2, 3\)")
    refused([("a", FusedSlice((0,), (2,), (0,)))], Mismatch, "w: its slice a must have the 2 dimensions")
    refused([("a", FusedSlice((0, 0), (2, 3), (0,)))], Mismatch, "w: its slice a must list each dimension once")
    refused([("a", FusedSlice((0, 0), (1, 3), (1, 1)))], Mismatch, "w: its slice a must list each dimension once")
    row = FusedSlice((0, 0), (1, 3), (1,))
    refused([("a", row), ("a", row)], Mismatch, "the name a was passed twice")


def test_a_slice_scattered_over_a_local_tensor_is_refused_by_name():
    """Of one row, a rank has the ends in rows 0 and 1 of its local tensor: there is no view of them."""
    ends = [(Box((0, 0), (1, 2)), (0, 0), 0), (Box((0, 2), (1, 3)), (1, 0), 0), (Box((1, 0), (2, 3)), (0, 0), 1)]
    parts = [("b", FusedSlice((1, 0), (2, 3), (1,))), ("a", FusedSlice((0, 0), (1, 3), (1,)))]
    held = ExplicitSharding((2, 3), ShardMap.of(ends))
    refused(parts, Unsupported, "its slice a are not a box of the local tensor", torch.zeros(2, 3), held)
