"""Whatever a layout says: it is refused, or all that is planned from it lies in what trainer ranks hold."""

import math

import pytest

from fuzz.arbitrary import changed, value_of
from fuzz.settings import fuzzed
from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.decoders import pack_blob, unpack_blob
from sglang_reshard.layout.regions import Box, Region
from sglang_reshard.plan import RankLocation, TensorIndex, plan_reads, rank_demand, unread_tensors
from sglang_reshard.protocol.validation import check_layout
from sglang_reshard.sources import SourceLayout
from sglang_reshard.trace.program import Copy
from support.drawn import layout_of


def plan(layout, trainer_ranks):
    """An engine rank that takes everything, and what it takes lies in its trainer ranks' local tensors."""
    index = TensorIndex.of(layout)
    copies, end = [], 0
    for tensor in layout.tensors:
        if tensor.spec.numel:
            strides = tuple(math.prod(tensor.shape[d + 1 :]) for d in range(len(tensor.shape)))
            copies.append(Copy(tensor.name, Region.of(Box.whole(tensor.shape)), "live", 0, strides))
            end += tensor.spec.nbytes
    plan = plan_reads(index, copies, RankLocation(0, 1, "a", ("a",) * trainer_ranks))
    assert plan.least_bytes() == end
    extents = [layout.min_local_shapes(rank) for rank in range(trainer_ranks)]
    for row in range(len(plan.trainer_ranks)):
        _, part, tensor = plan.read(row)
        shape, region = extents[int(plan.trainer_ranks[row])][tensor], part.local_region
        if region.is_flat:
            reach = sum((n - 1) * s for n, s in zip(region.count, region.step, strict=True))
            assert 0 <= region.start[0] <= region.start[0] + reach < shape[0]
            continue
        bounds = zip(region.start, region.count, region.step, shape, strict=True)
        assert all(a >= 0 and n >= 1 and s >= 1 and a + (n - 1) * s < length for a, n, s, length in bounds)
    assert unread_tensors(index, [rank_demand(index, plan, "a")]) == ()
    assert len(layout.local_bytes()) == trainer_ranks


@fuzzed
def test_changed_layouts_are_refused_or_can_be_planned(random):
    base = layout_of(random)
    layout = base
    for _ in range(random.choice((1, 1, 2, 4))):
        layout = changed(layout, random)
    try:
        digest, blob = pack_blob(layout)
        layout = unpack_blob(blob, SourceLayout, digest)
        check_layout(layout, base.trainer_ranks)
    except Mismatch:
        return
    plan(layout, base.trainer_ranks)


@fuzzed
def test_arbitrary_layouts_are_refused_or_can_be_planned(random):
    layout = value_of(SourceLayout, random)
    trainer_ranks = random.choice((layout.trainer_ranks, 1, 2))
    try:
        check_layout(layout, trainer_ranks)
    except Mismatch:
        return
    plan(layout, trainer_ranks)


@fuzzed
def test_what_is_sent_in_earnest_is_not_refused(random):
    layout = layout_of(random)
    check_layout(layout, layout.trainer_ranks)
    with pytest.raises(Mismatch, match="trainer ranks"):
        check_layout(layout, layout.trainer_ranks + 1)
