"""Properties of read plans: exactly the rank's elements, from trainer ranks that hold them, evenly spread."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_reshard.layout.regions import Box, LocalRegion
from sglang_reshard.layout.source_layout import EXPLICIT
from sglang_reshard.plan import RankLocation, TensorIndex, plan_reads, rank_demand, unread_tensors
from sglang_reshard.plan.read_plan import demanded_shards
from sglang_reshard.sources import Mesh, Placement, ShardMap, SourceLayout, SourceTensor
from support.plans import (
    HOST,
    copies_of,
    meshed_layouts,
    read_plans,
    tensor_parallel,
    tp_copies,
    wanted,
)


@st.composite
def jobs(draw):
    layout = draw(meshed_layouts())
    copies = draw(copies_of(layout))
    hosts = tuple(draw(st.sampled_from(["a", "b"])) for _ in range(layout.trainer_ranks))
    engine_ranks = draw(st.integers(1, 5))
    location = RankLocation(
        draw(st.integers(0, engine_ranks - 1)), engine_ranks, draw(st.sampled_from(["a", "b"])), hosts
    )
    return layout, copies, location


@given(jobs())
def test_each_element_is_read_once_from_a_holder_on_this_host_if_there_is_one(job):
    layout, copies, location = job
    index = TensorIndex.of(layout)
    plan = plan_reads(index, copies, location)
    assert plan.nbytes.sum() == sum(
        c.region.numel * index.tensor_class(index.index_of[c.source]).item_bytes for c in copies
    )
    for number, trainer_rank in zip(plan.shards(index).tolist(), plan.trainer_ranks.tolist(), strict=True):
        holders = index.shard(number).ranks
        assert trainer_rank in holders
        near = [t for t in holders if location.trainer_hosts[t] == location.host]
        assert trainer_rank in (near or holders)


@given(jobs())
def test_equal_plans_have_equal_digests_and_others_do_not(job):
    layout, copies, location = job
    digest = plan_reads(TensorIndex.of(layout), copies, location).digest()
    assert digest == plan_reads(TensorIndex.of(layout), list(copies), location).digest()
    if copies:
        assert digest != plan_reads(TensorIndex.of(layout), copies[1:], location).digest()


def test_replicas_are_read_evenly():
    """HSDP, 2 x 4 ranks: each shard is on two trainer ranks, each norm on all; 4 engine ranks."""
    shapes = [(64, 32), (32, 64), (32,)] * 100
    placements = ((Placement(), Placement(0)), (Placement(), Placement()))
    tensors = tuple(SourceTensor(f"t{i}", s, "float32", 0, len(s) == 1) for i, s in enumerate(shapes))
    layout = SourceLayout(8, (Mesh((2, 4), tuple(range(8))),), placements, tensors)
    copies = tp_copies(layout, [0, 1, -1] * 100, 4)
    sent = np.zeros(8)
    for plan in read_plans(layout, copies)[1]:
        for trainer_rank, (nbytes, _) in plan.traffic().items():
            sent[trainer_rank] += nbytes
    assert sent.max() <= 1.05 * sent.min()


def test_a_replica_on_the_same_host_is_found_at_any_local_start():
    box = Box((0,), (8,))
    held = ShardMap.of([(box, (0,), 0), (box, (5,), 1)])
    layout = SourceLayout(2, (), (), (SourceTensor("t0", (8,), "float32", EXPLICIT, 0),), (held,))
    for host, trainer_rank, first in (("a", 0, 0), ("b", 1, 5)):
        plan = plan_reads(TensorIndex.of(layout), [wanted(layout, 0, box)], RankLocation(0, 1, host, ("a", "b")))
        assert set(plan.traffic()) == {trainer_rank}
        assert plan.items[0].local_region == LocalRegion((first,), (8,), (1,))


@given(jobs())
def test_demands_list_shards_and_unread_tensors(job):
    layout, copies, location = job
    index = TensorIndex.of(layout)
    demands = [rank_demand(index, plan_reads(index, copies, location), HOST)]
    shard_ids = np.flatnonzero(demanded_shards(index, demands)[0]).tolist()
    needed = [(int(index.tensor_of(number)), index.shard(number).box) for number in shard_ids]
    expected = set()
    for copy in copies:
        tensor = index.index_of[copy.source]
        for shard in index.tensor_class(tensor).shard_map.shards:
            if copy.region.intersect(shard.box):
                expected.add((tensor, shard.box))
    assert set(needed) == expected
    # A box that ranks hold at different places of their local tensors is plan from one of them.
    assert len(needed) == len(expected)
    assert set(unread_tensors(index, demands)) == {t.name for t in layout.tensors} - {c.source for c in copies}


def test_a_hundred_thousand_tensors_of_few_classes_are_planned_by_class():
    """No loop over tensors times shards: 100,000 tensors on 64 trainer ranks, 6.4 million reads, few items."""
    layout = tensor_parallel(64, [(64, 16), (128, 16)] * 50_000, [0, 0] * 50_000)
    (copies,) = tp_copies(layout, [0, 1] * 50_000, 1)
    plan = plan_reads(TensorIndex.of(layout), copies, RankLocation(0, 4, HOST, (HOST,) * 64))
    assert len(plan.copy_ids) == 50_000 * (64 + 64)
    assert len(plan.items) == 128
