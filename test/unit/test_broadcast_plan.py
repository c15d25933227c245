"""Properties of broadcast plans: every needed element is received once, in buckets of bounded size."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import ALIGN_BYTES, Box
from sglang_reshard.plan import ClusterTopology
from sglang_reshard.routes.broadcast.plan import plan_broadcast
from support.plans import HOST, rank_demands, tensor_parallel, tp_copies, wanted


@st.composite
def jobs(draw):
    trainers, engines = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    count = draw(st.integers(1, 4))
    shapes = [tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))) for _ in range(count)]
    sides = [
        tuple(draw(st.integers(-1, len(shape) - 1)) for _ in range(2)) for shape in shapes
    ]  # how the trainer and the engine shard each tensor
    layout = tensor_parallel(trainers, shapes, [source for source, _ in sides])
    return layout, tp_copies(layout, [d for _, d in sides], engines), draw(st.sampled_from([1, 7, 64, 1 << 20]))


def plan_of(layout, copies, bucket_bytes):
    index, demands = rank_demands(layout, copies)
    return index, plan_broadcast(
        index, demands, ClusterTopology.of(demands, [HOST] * layout.trainer_ranks), bucket_bytes
    )


@given(jobs())
def test_buckets_are_bounded_and_segments_do_not_overlap(job):
    layout, copies, bucket_bytes = job
    index, plan = plan_of(layout, copies, bucket_bytes)
    for bucket in [bucket for rank in range(len(copies)) for bucket in plan.buckets(index, rank)]:
        end = 0
        for segment in bucket.segments:
            item = index.tensor_class(segment.tensor).item_bytes
            assert segment.offset >= end
            assert segment.offset % ALIGN_BYTES == 0
            assert segment.shard.box.intersect(segment.box) == segment.box
            end = segment.offset + segment.box.numel * item
            assert end == segment.offset + segment.nbytes
        assert end <= bucket.nbytes <= max(bucket_bytes, item) + ALIGN_BYTES
        assert end <= max(bucket_bytes, item)


def test_tp4_to_tp16_is_four_groups_of_four_led_by_rank_4k():
    dims = [0, 1, -1]
    layout = tensor_parallel(4, [(64, 32), (32, 64), (32,)], dims)
    index, plan = plan_of(layout, tp_copies(layout, dims, 16), 1 << 20)
    assert not plan.direct_reads.any()
    assert [(group.trainer_rank, group.leader, group.members) for group in plan.groups] == [
        (k, 4 * k, tuple(range(4 * k, 4 * k + 4))) for k in range(4)
    ]
    shard_bytes = 2 * (64 * 32 // 4 + 32 * 64 // 4 + 32)
    for rank in range(16):
        assert [sum(s.nbytes for s in bucket.segments) for bucket in plan.buckets(index, rank)] == [shard_bytes]


def test_equal_and_shrinking_sizes_need_no_group_for_sharded_tensors():
    for trainers, engines in ((4, 4), (16, 4), (6, 2)):
        layout = tensor_parallel(trainers, [(96, 8), (8, 96)], [0, 1])
        _, plan = plan_of(layout, tp_copies(layout, [0, 1], engines), 1 << 20)
        assert plan.groups == ()
        assert plan.direct_reads.sum() == 2 * trainers


def test_a_replicated_tensor_comes_from_the_nearest_trainer_rank():
    layout = tensor_parallel(4, [(8,)], [-1])
    _, plan = plan_of(layout, tp_copies(layout, [-1], 8), 1 << 20)
    assert [(group.trainer_rank, group.members) for group in plan.groups] == [(k, (2 * k, 2 * k + 1)) for k in range(4)]


def test_a_bucket_smaller_than_an_element_has_one():
    layout = tensor_parallel(1, [(3,)], [0], "float32")
    index, plan = plan_of(layout, tp_copies(layout, [-1], 2), 1)
    assert [bucket.segments[0].box for bucket in plan.buckets(index, 1)] == [Box((n,), (n + 1,)) for n in range(3)]


def test_groups_take_turns():
    layout = tensor_parallel(2, [(64,)], [0], "float32")
    index, plan = plan_of(layout, tp_copies(layout, [-1], 4), 32)
    assert len(plan.groups) == 2
    assert [bucket.group for bucket in plan.buckets(index, 3)] == [*plan.groups] * math.ceil(64 * 4 / 2 / 32)


def test_memory_is_read_on_its_own_host_and_a_rank_outside_the_audience_may_relay():
    layout = tensor_parallel(2, [(8,)], [0])
    box = Box((4,), (8,))  # trainer rank 1's, on host b
    index, demands = rank_demands(layout, [[wanted(layout, 0, box)], [wanted(layout, 0, box)], []], ["a", "a", "b"])
    plan = plan_broadcast(index, demands, ClusterTopology.of(demands, ["a", "b"]), 64)
    assert [(group.trainer_rank, group.leader, group.members) for group in plan.groups] == [(1, 2, (0, 1, 2))]
    with pytest.raises(Unsupported, match=r"trainer rank 1 .*c"):
        plan_broadcast(index, demands, ClusterTopology.of(demands, ["a", "c"]), 64)
