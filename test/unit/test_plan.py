"""Laws of a plan: everything needed moves once, to those who need it, in buckets of the stated size."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout import Box, Region
from sglang_reshard.plan import ALIGN_BYTES, Pieces, make_plan, needs_of
from sglang_reshard.sources import Layout, Mesh, Placement, SourceTensor
from sglang_reshard.trace import Copy

HOST = "host"


def tensor_parallel(trainers, shapes, dims, dtype="bfloat16"):
    """A layout of tensors sharded along `dims` (-1: replicated) over one mesh dimension."""
    placements = sorted({(Placement(d),) for d in dims}, key=str)
    tensors = tuple(
        SourceTensor(f"t{i}", shape, dtype, 0, placements.index((Placement(d),)))
        for i, (shape, d) in enumerate(zip(shapes, dims, strict=True))
    )
    return Layout(trainers, (Mesh((trainers,), tuple(range(trainers))),), tuple(placements), tensors)


def wanted(layout, tensor, box):
    dims = len(box.start)
    return Copy(layout.tensors[tensor].name, Region(box.start, box.shape, (1,) * dims), "live", 0, (0,) * dims)


def tp_slice(layout, tensor, dim, rank, size):
    """A rank's part of a tensor that `size` engine ranks split along `dim` as torch.chunk would; None if empty."""
    shape = layout.tensors[tensor].shape
    if dim < 0:
        return wanted(layout, tensor, Box.whole(shape))
    part = -(-shape[dim] // size)
    start, stop = [0] * len(shape), list(shape)
    start[dim], stop[dim] = min(rank * part, shape[dim]), min((rank + 1) * part, shape[dim])
    box = Box(tuple(start), tuple(stop))
    return wanted(layout, tensor, box) if box.numel else None


@st.composite
def jobs(draw):
    trainers, engines = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    count = draw(st.integers(1, 4))
    shapes = [tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))) for _ in range(count)]
    sides = [
        tuple(draw(st.integers(-1, len(shape) - 1)) for _ in range(2)) for shape in shapes
    ]  # how the trainer and the engine shard each tensor
    layout = tensor_parallel(trainers, shapes, [source for source, _ in sides])
    copies = [
        [c for i, (_, d) in enumerate(sides) if (c := tp_slice(layout, i, d, rank, engines))] for rank in range(engines)
    ]
    return layout, copies, draw(st.sampled_from([1, 7, 64, 1 << 20]))


def plan_of(layout, copies, bucket_bytes, hosts=None):
    pieces = Pieces.of(layout)
    needs = [needs_of(pieces, c, HOST) for c in copies]
    return pieces, needs, make_plan(pieces, needs, hosts or [HOST] * layout.trainer_ranks, bucket_bytes)


def arrivals(pieces, plan, engine_rank):
    """(tensor, box) of all that reaches an engine rank."""
    for direct in plan.directs:
        if direct.engine_rank == engine_rank:
            yield from ((pieces.tensor_of[i], pieces.all[i].box) for i in direct.pieces)
    for r in plan.rounds:
        if engine_rank in plan.lanes[r.lane].members:
            yield from ((pieces.tensor_of[s.piece], s.box) for s in r.segments)


@given(jobs())
def test_every_needed_element_reaches_its_engine_rank_exactly_once(job):
    layout, copies, bucket_bytes = job
    pieces, _, plan = plan_of(layout, copies, bucket_bytes)
    for rank, own in enumerate(copies):
        arrived = list(arrivals(pieces, plan, rank))
        for copy in own:
            tensor = next(i for i, t in enumerate(layout.tensors) if t.name == copy.source)
            hits = [copy.region.intersect(box) for t, box in arrived if t == tensor]
            assert sum(hit[0].numel for hit in hits if hit) == copy.region.numel


@given(jobs())
def test_a_trainer_rank_is_only_asked_for_what_it_holds(job):
    pieces, _, plan = plan_of(*job)
    for direct in plan.directs:
        assert all(direct.trainer_rank in pieces.all[i].ranks for i in direct.pieces)
    for r in plan.rounds:
        lane = plan.lanes[r.lane]
        assert lane.leader in lane.members
        for segment in r.segments:
            assert lane.trainer_rank in pieces.all[segment.piece].ranks
            assert segment.box.intersect(pieces.all[segment.piece].box) == segment.box


@given(jobs())
def test_buckets_keep_their_size_and_segments_do_not_overlap(job):
    layout, copies, bucket_bytes = job
    pieces, _, plan = plan_of(layout, copies, bucket_bytes)
    for r in plan.rounds:
        end = 0
        for segment in r.segments:
            item = pieces.item_bytes(segment.piece)
            assert segment.offset >= end
            assert segment.offset % ALIGN_BYTES == 0
            end = segment.offset + segment.box.numel * item
        assert end <= r.nbytes <= max(bucket_bytes, item) + ALIGN_BYTES
        assert end <= max(bucket_bytes, item)


@given(jobs())
def test_the_plan_is_the_same_on_every_rank(job):
    assert plan_of(*job)[2].digest() == plan_of(*job)[2].digest()


@given(jobs())
def test_least_bytes_are_those_of_the_live_slices(job):
    layout, copies, bucket_bytes = job
    _, needs, _ = plan_of(layout, copies, bucket_bytes)
    for rank_needs, own in zip(needs, copies, strict=True):
        assert rank_needs.least_bytes == sum(2 * c.region.numel for c in own)


def test_tp4_to_tp16_is_four_groups_of_four_led_by_rank_4k():
    layout = tensor_parallel(4, [(64, 32), (32, 64), (32,)], [0, 1, -1])
    dims = [0, 1, -1]
    copies = [[tp_slice(layout, i, d, rank, 16) for i, d in enumerate(dims)] for rank in range(16)]
    _, _, plan = plan_of(layout, copies, 1 << 20)
    assert plan.directs == ()
    assert [(lane.trainer_rank, lane.leader, lane.members) for lane in plan.lanes] == [
        (k, 4 * k, tuple(range(4 * k, 4 * k + 4))) for k in range(4)
    ]
    shard_bytes = 2 * (64 * 32 // 4 + 32 * 64 // 4 + 32)
    assert [sum(s.box.numel * 2 for s in r.segments) for r in plan.rounds] == [shard_bytes] * 4


def test_equal_and_shrinking_sizes_need_no_group_for_sharded_tensors():
    for trainers, engines in ((4, 4), (16, 4), (6, 2)):
        layout = tensor_parallel(trainers, [(96, 8), (8, 96)], [0, 1])
        copies = [[tp_slice(layout, i, i, rank, engines) for i in range(2)] for rank in range(engines)]
        _, _, plan = plan_of(layout, copies, 1 << 20)
        assert plan.lanes == ()
        read_by = [plan.trainer_ranks_read_by(rank) for rank in range(engines)]
        per = trainers // engines
        assert read_by == [tuple(range(e * per, (e + 1) * per)) for e in range(engines)]


def test_a_replicated_tensor_comes_from_the_nearest_trainer_rank():
    layout = tensor_parallel(4, [(8,)], [-1])
    copies = [[tp_slice(layout, 0, -1, rank, 8)] for rank in range(8)]
    _, _, plan = plan_of(layout, copies, 1 << 20)
    assert [(lane.trainer_rank, lane.members) for lane in plan.lanes] == [(k, (2 * k, 2 * k + 1)) for k in range(4)]


def test_a_bucket_smaller_than_an_element_carries_one():
    layout = tensor_parallel(1, [(3,)], [0], "float32")
    copies = [[tp_slice(layout, 0, -1, rank, 2)] for rank in range(2)]
    _, _, plan = plan_of(layout, copies, 1)
    assert [r.segments[0].box.numel for r in plan.rounds] == [1, 1, 1]


def test_lanes_take_turns():
    layout = tensor_parallel(2, [(64,)], [0], "float32")
    copies = [[tp_slice(layout, 0, 0, rank, 4)] for rank in range(4)]
    _, _, plan = plan_of(layout, copies, 32)
    assert [r.lane for r in plan.rounds] == [0, 1] * math.ceil(64 * 4 / 2 / 32)


def test_memory_is_read_on_its_own_host_and_a_rank_outside_the_audience_may_relay():
    layout = tensor_parallel(2, [(8,)], [0])
    pieces = Pieces.of(layout)
    box = Box((4,), (8,))  # trainer rank 1's, on host b
    copies = [[wanted(layout, 0, box)], [wanted(layout, 0, box)], []]
    needs = [needs_of(pieces, c, host) for c, host in zip(copies, ("a", "a", "b"), strict=True)]
    plan = make_plan(pieces, needs, ["a", "b"], 64)
    assert [(lane.trainer_rank, lane.leader, lane.members) for lane in plan.lanes] == [(1, 2, (0, 1, 2))]
    with pytest.raises(Unsupported, match=r"trainer rank 1 .*c"):
        make_plan(pieces, needs, ["a", "c"], 64)
