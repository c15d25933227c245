"""Tensors with an explicit sharding: fused local tensors, padding, blocks that no mesh describes."""

import pytest
import torch

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.extras.finite import not_finite
from sglang_reshard.layout.regions import Box
from sglang_reshard.layout.source_layout import first_difference
from sglang_reshard.sources import (
    ExplicitSharding,
    ShardBox,
    ShardMap,
    blocks,
    describe,
    tied_names,
)
from support.dtensors import as_rank
from support.toy import checkpoint
from support.toy_fused import fused

NAN = float("nan")


def described(given, rank=0, size=1):
    with as_rank(rank, size):
        return describe(given, trainer_rank=rank, global_ranks=tuple(range(size)))


def rows(*held):
    """Returns the shard map of a tensor of two columns, from (first row, stop, first local row, trainer rank)."""
    return ShardMap.of((Box((a, 0), (b, 2)), (at, 0), rank) for a, b, at, rank in held)


# -- fused as by Megatron


def states_of(tp, ranks):
    return [described(fused(checkpoint(1), tp, ranks, rank), rank, ranks) for rank in range(ranks)]


def test_a_fused_local_tensor_is_the_shard_of_each():
    state = states_of(2, 2)[1]
    shard = {t.name: s for t, s in zip(state.layout.tensors, state.shards, strict=True)}
    assert shard["q.weight"].data_ptr() == shard["k.weight"].data_ptr() == shard["v.weight"].data_ptr()
    assert shard["q.weight"].shape == (30, 16)
    assert shard["embed.weight"].shape[0] > 10, "padding is part of it"


def test_local_bytes_are_those_of_the_shards():
    (state,) = states_of(1, 1)
    assert state.layout.local_bytes() == (sum(t.numel() * 4 for t in checkpoint(1).values()),)
    assert sum(s.numel() * 4 for s in state.shards) > 1.5 * state.layout.local_bytes()[0]


# -- tied weights, and weights that are not finite


def test_pieces_of_one_local_tensor_are_not_tied_unless_they_are_the_same_piece():
    state = states_of(2, 2)[1]
    assert tied_names(state.layout, state.shards) == {}
    local = torch.ones(4, 2)
    given = [
        ("a", local, ExplicitSharding((2, 2), rows((0, 2, 0, 0)))),
        ("b", local, ExplicitSharding((2, 2), rows((0, 2, 2, 0)))),
        ("tied to b", local.detach(), ExplicitSharding((2, 2), rows((0, 2, 2, 0)))),
    ]
    state = described(given)
    assert tied_names(state.layout, state.shards) == {"tied to b": "b"}


def test_the_tensor_whose_piece_is_not_finite_is_named_and_what_is_around_pieces_does_not_count():
    whole = checkpoint(1)
    whole["v.weight"][4, 7] = NAN  # of the second group of heads
    state = described(fused(whole, 2, 2, 1), 1, 2)
    told = not_finite(state.layout, state.shards, 1)
    assert told == (
        "trainer rank 1: 1 of the 48 elements of v.weight on this rank are not finite (1 NaN), "
        "the first at global index (4, 7)"
    )
    state = described(fused(whole, 2, 2, 0), 0, 2)
    assert not_finite(state.layout, state.shards, 0) is None
    assert not all(shard.isfinite().all() for shard in state.shards), "there is padding"


# -- local tensors


def test_blocks_are_flat_or_shaped_and_equal_ones_are_replicas():
    whole = torch.arange(12.0).view(3, 4)
    boxes = [Box((0, 0), (3, 2)), Box((0, 2), (3, 4)), Box((0, 2), (3, 4)), None]
    held = blocks(whole.shape, boxes)
    assert held.shape == (3, 4)
    assert [(p.box, p.ranks, p.local_start) for p in held.shard_map.shards] == [
        (boxes[0], (0,), (0, 0)),
        (boxes[1], (1, 2), (0, 0)),
    ]
    for rank, box in enumerate(boxes):
        local = whole[box.slices()] if box else torch.empty(0)
        for given in (local, local.flatten()):
            (shard,) = described([("w", given, held)], rank, 4).shards
            assert torch.equal(shard, local)


def test_a_rank_that_holds_nothing_gives_the_dtype_and_any_shape():
    held = ExplicitSharding((2, 2), rows((0, 2, 0, 1)))
    for nothing in (torch.empty(0), torch.empty(0, 7), torch.ones(3, 3)):
        state = described([("w", nothing.to(torch.bfloat16), held)], 0, 2)
        assert state.layout.tensors[0].dtype == "bfloat16"
        assert [shard.numel() for shard in state.shards] == [0]
        assert state.layout.local_bytes() == (0, 8)


def test_the_order_of_shards_does_not_matter():
    shards = rows((0, 1, 0, 0), (1, 2, 0, 1)).shards
    states = [
        described([("w", torch.ones(1, 2), ExplicitSharding((2, 2), ShardMap(p)))], 0, 2)
        for p in (shards, shards[::-1])
    ]
    assert states[0].layout == states[1].layout


# -- mistakes


REFUSED = {
    "hold only 2 of its 4 elements": (rows((0, 1, 0, 0)), Unsupported),
    "outside the 2 trainer ranks": (rows((0, 2, 0, 2)), Mismatch),
    "overlap": (rows((0, 2, 0, 0), (1, 2, 0, 1)), Mismatch),
    r"exceeds shape \(2, 2\)": (rows((1, 3, 0, 0)), Mismatch),
    "does not have the 2 dimensions": (ShardMap((ShardBox(Box((0,), (4,)), (0,), (0,)),)), Mismatch),
    r"needs at least \(5, 2\)": (rows((0, 2, 3, 1)), Mismatch),
}


@pytest.mark.parametrize("says", REFUSED)
def test_invalid_shardings_are_refused_by_name_and_trainer_rank(says):
    shard_map, error = REFUSED[says]
    with pytest.raises(error, match=says) as caught:
        described([("w", torch.zeros(4, 2), ExplicitSharding((2, 2), shard_map))], 1, 2)
    assert str(caught.value).startswith("trainer rank 1: w")


@pytest.mark.parametrize("local", [torch.zeros(3), torch.zeros(1, 2, 2), torch.zeros(2, 1)], ids=str)
def test_a_local_tensor_of_another_shape_is_refused(local):
    with pytest.raises(Mismatch, match=r"w has a local tensor of shape .* needs at least \(2, 2\)"):
        described([("w", local, ExplicitSharding((2, 2), rows((0, 2, 0, 0))))])


def test_ranks_that_disagree_get_the_first_shard_that_differs():
    a, b = (
        described([("w", torch.zeros(4, 2), ExplicitSharding((2, 2), rows((0, 1, 0, 0), (1, 2, at, 0))))]).layout
        for at in (1, 2)
    )
    message = first_difference(a, b, 3)
    assert "disagree at tensor w" in message
    assert "local_start=(1, 0)" in message.split("trainer rank 3")[0]
    assert "local_start=(2, 0)" in message.split("trainer rank 3")[1]
    assert "local_start=(0, 0)" not in message
    plain = described([("w", torch.zeros(2, 2))]).layout
    assert "disagree at tensor w" in first_difference(a, plain, 1)
