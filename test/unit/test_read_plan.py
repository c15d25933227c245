"""Laws of what an engine rank takes in: exactly its elements, from those who hold them, evenly shared."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.layout.regions import Box, Region
from sglang_reshard.layout.source_layout import EXPLICIT
from sglang_reshard.plan import RankLocation, TensorIndex, plan_reads, rank_demand, unread_tensors
from sglang_reshard.plan.read_plan import demanded_shards
from sglang_reshard.sources import Mesh, Placement, ShardMap, SourceLayout, SourceTensor
from support.plans import (
    HOST,
    all_needs,
    copies_of,
    intakes,
    loaded,
    meshed_layouts,
    shards,
    taken_in,
    tensor_parallel,
    tp_copies,
    values,
    wanted,
)


@st.composite
def jobs(draw):
    layout = draw(meshed_layouts())
    copies = draw(copies_of(layout))
    hosts = tuple(draw(st.sampled_from(["a", "b"])) for _ in range(layout.trainer_ranks))
    engine_ranks = draw(st.integers(1, 5))
    seat = RankLocation(draw(st.integers(0, engine_ranks - 1)), engine_ranks, draw(st.sampled_from(["a", "b"])), hosts)
    return layout, copies, seat


@given(jobs())
@settings(max_examples=300)
def test_the_rows_fill_the_targets_as_the_copies_would(job):
    layout, copies, seat = job
    whole = values(layout)
    taken = plan_reads(TensorIndex.of(layout), copies, seat)
    local = {t: shards(layout, whole, t) for t in range(layout.trainer_ranks)}
    expected, found = loaded(copies, whole), taken_in(taken, local)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@given(jobs())
def test_each_element_comes_once_from_a_holder_and_from_this_host_where_it_can(job):
    layout, copies, seat = job
    catalog = TensorIndex.of(layout)
    taken = plan_reads(catalog, copies, seat)
    assert taken.nbytes.sum() == sum(
        c.region.numel * catalog.tensor_class(catalog.index_of[c.source]).item_bytes for c in copies
    )
    for number, trainer_rank in zip(taken.shards(catalog).tolist(), taken.trainer_ranks.tolist(), strict=True):
        holders = catalog.shard(number).ranks
        assert trainer_rank in holders
        near = [t for t in holders if seat.trainer_hosts[t] == seat.host]
        assert trainer_rank in (near or holders)


@given(jobs())
def test_what_is_landed_twice_comes_once(job):
    layout, copies, seat = job
    catalog = TensorIndex.of(layout)
    taken = plan_reads(catalog, copies, seat)
    elements = {t.name: torch.zeros(t.shape, dtype=torch.bool) for t in layout.tensors}
    for c in copies:
        elements[c.source][c.region.slices()] = True
    item_bytes = {t.name: t.spec.item_bytes for t in layout.tensors}
    least = sum(int(mask.sum()) * item_bytes[name] for name, mask in elements.items())
    regions = sum(region.numel * item_bytes[source] for source, region in {(c.source, c.region) for c in copies})
    # Regions that overlap without being the same are brought each for itself; no loader has such.
    assert least <= taken.least_bytes() <= regions
    for row, first in taken.duplicates.items():
        assert first < row
        assert taken.trainer_ranks[row] == taken.trainer_ranks[first]
        assert taken.tensor_ids[taken.copy_ids[row]] == taken.tensor_ids[taken.copy_ids[first]]
        assert taken.items[taken.item_ids[row]].local_region == taken.items[taken.item_ids[first]].local_region


@given(jobs())
def test_rows_are_put_in_order_of_landing_for_each_trainer_rank(job):
    layout, copies, seat = job
    taken = plan_reads(TensorIndex.of(layout), copies, seat)
    targets = list(dict.fromkeys(c.target for c in copies))
    places = [
        (int(t), targets.index(taken.copies[c].target), taken.copies[c].offset, taken.items[p].offset)
        for t, c, p in zip(taken.trainer_ranks, taken.copy_ids, taken.item_ids, strict=True)
    ]
    assert places == sorted(places)
    assert sorted(row for t in taken.traffic() for row in taken.reads_from(t)) == list(range(len(places)))
    for trainer_rank, (nbytes, rows) in taken.traffic().items():
        own = taken.reads_from(trainer_rank)
        assert (int(taken.nbytes[own.start : own.stop].sum()), len(own)) == (nbytes, rows)


@given(jobs())
def test_the_same_job_has_the_same_digest_and_another_one_another(job):
    layout, copies, seat = job
    digest = plan_reads(TensorIndex.of(layout), copies, seat).digest()
    assert digest == plan_reads(TensorIndex.of(layout), list(copies), seat).digest()
    if copies:
        assert digest != plan_reads(TensorIndex.of(layout), copies[1:], seat).digest()


def test_replicas_share_the_sending_evenly():
    """HSDP, 2 x 4 ranks: each shard is on two trainer ranks, each norm on all; 4 engine ranks."""
    shapes = [(64, 32), (32, 64), (32,)] * 100
    placements = ((Placement(), Placement(0)), (Placement(), Placement()))
    tensors = tuple(SourceTensor(f"t{i}", s, "float32", 0, len(s) == 1) for i, s in enumerate(shapes))
    layout = SourceLayout(8, (Mesh((2, 4), tuple(range(8))),), placements, tensors)
    copies = tp_copies(layout, [0, 1, -1] * 100, 4)
    sent = np.zeros(8)
    for taken in intakes(layout, copies)[1]:
        for trainer_rank, (nbytes, _) in taken.traffic().items():
            sent[trainer_rank] += nbytes
    assert sent.max() <= 1.05 * sent.min()


def test_what_is_on_all_hosts_is_taken_from_this_one():
    layout = tensor_parallel(4, [(8, 4)] * 6, [-1] * 6)
    (copies,) = tp_copies(layout, [-1] * 6, 1)
    taken = plan_reads(TensorIndex.of(layout), copies, RankLocation(0, 1, "b", ("a", "a", "b", "b")))
    assert set(taken.traffic()) == {2, 3}
    assert len({nbytes for nbytes, _ in taken.traffic().values()}) == 1


def test_a_replica_on_this_host_is_found_wherever_it_lies_in_its_local_tensor():
    box = Box((0,), (8,))
    held = ShardMap.of([(box, (0,), 0), (box, (5,), 1)])
    layout = SourceLayout(2, (), (), (SourceTensor("t0", (8,), "float32", EXPLICIT, 0),), (held,))
    for host, trainer_rank, first in (("a", 0, 0), ("b", 1, 5)):
        taken = plan_reads(TensorIndex.of(layout), [wanted(layout, 0, box)], RankLocation(0, 1, host, ("a", "b")))
        assert set(taken.traffic()) == {trainer_rank}
        assert taken.items[0].local_region == Region((first,), (8,), (1,))


def test_equal_and_shrinking_sizes_take_from_their_own_trainer_ranks():
    for trainers, engines in ((4, 4), (16, 4), (6, 2)):
        layout = tensor_parallel(trainers, [(96, 8), (8, 96)], [0, 1])
        _, taken = intakes(layout, tp_copies(layout, [0, 1], engines))
        per = trainers // engines
        assert [tuple(t.traffic()) for t in taken] == [tuple(range(e * per, (e + 1) * per)) for e in range(engines)]


@given(jobs())
def test_needs_say_which_pieces_and_names_without_use_are_found(job):
    layout, copies, seat = job
    catalog = TensorIndex.of(layout)
    needs = [rank_demand(catalog, plan_reads(catalog, copies, seat), HOST)]
    pieces = np.flatnonzero(demanded_shards(catalog, needs)[0]).tolist()
    needed = [(int(catalog.tensor_of(number)), catalog.shard(number).box) for number in pieces]
    expected = set()
    for copy in copies:
        tensor = catalog.index_of[copy.source]
        for piece in catalog.tensor_class(tensor).shard_map.shards:
            if copy.region.intersect(piece.box):
                expected.add((tensor, piece.box))
    assert set(needed) == expected
    # A box that ranks hold at different places of their local tensors is taken from one of them.
    assert len(needed) == len(expected)
    assert set(unread_tensors(catalog, needs)) == {t.name for t in layout.tensors} - {c.source for c in copies}


def test_a_rank_that_lacks_nothing_takes_in_nothing():
    layout = tensor_parallel(2, [(4, 4)], [0])
    catalog, needs = all_needs(layout, [[]])
    assert needs[0].traffic == {}
    assert needs[0].least_bytes == 0
    assert unread_tensors(catalog, needs) == ("t0",)


def test_a_hundred_thousand_tensors_of_few_kinds_are_planned_by_kind():
    """No loop over tensors times pieces: 100,000 tensors on 64 trainer ranks, 1.6 million pieces lacking, few parts."""
    layout = tensor_parallel(64, [(64, 16), (128, 16)] * 50_000, [0, 0] * 50_000)
    (copies,) = tp_copies(layout, [0, 1] * 50_000, 1)
    taken = plan_reads(TensorIndex.of(layout), copies, RankLocation(0, 4, HOST, (HOST,) * 64))
    assert len(taken.copy_ids) == 50_000 * (64 + 64)
    assert len(taken.items) == 128
