"""Layouts of ranks that list different tensors are combined as torch itself would put the tensors together."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.layout.source_layout import EXPLICIT
from sglang_reshard.layout.union import union
from sglang_reshard.protocol.validation import check_layout
from sglang_reshard.sources import ExplicitSharding, SourceTensor, TrainerState, blocks, describe
from sglang_reshard.sources.flat import flat_shard_map
from support.plans import assembled_states

RANKS = 4


def states_of(tensors_of_rank):
    ranks = tuple(range(len(tensors_of_rank)))
    return [describe(own, trainer_rank=rank, global_ranks=ranks) for rank, own in enumerate(tensors_of_rank)]


def union_of(states):
    layouts = list(dict.fromkeys(state.layout for state in states))
    return union(layouts, [layouts.index(state.layout) for state in states])


@given(st.data())
def test_every_tensor_is_put_together_from_the_ranks_that_list_it(data):
    """Plain ones, row-sharded ones and flat ones, each listed by some of the ranks."""
    given_, whole = [[] for _ in range(RANKS)], {}
    for number in range(data.draw(st.integers(1, 5))):
        shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
        listing = sorted(data.draw(st.sets(st.integers(0, RANKS - 1), min_size=1)))
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        name, kind = f"t{number}", data.draw(st.sampled_from(["plain", "rows", "flat"]))
        whole[name] = tensor
        if kind == "plain":
            for rank in listing:
                given_[rank].append((name, tensor.clone()))
            continue
        length = shape[0] if kind == "rows" else math.prod(shape)
        cuts = [length * i // len(listing) for i in range(len(listing) + 1)]
        if kind == "rows":
            boxes = [None] * RANKS
            for i, rank in enumerate(listing):
                boxes[rank] = Box((cuts[i], *(0,) * (len(shape) - 1)), (cuts[i + 1], *shape[1:]))
            sharding = blocks(shape, boxes)
            pieces = [tensor[cuts[i] : cuts[i + 1]].clone() for i in range(len(listing))]
        else:
            ranges = tuple((rank, cuts[i], cuts[i + 1]) for i, rank in enumerate(listing) if cuts[i] < cuts[i + 1])
            sharding = ExplicitSharding(shape, flat_shard_map(shape, ranges))
            pieces = [tensor.flatten()[cuts[i] : cuts[i + 1]].clone() for i in range(len(listing))]
        for rank, piece in zip(listing, pieces, strict=True):
            given_[rank].append((name, piece, sharding))
    for own in given_:
        own.append(("common", torch.ones(2)))
    whole["common"] = torch.ones(2)
    states = states_of(given_)
    layout = union_of(states)
    check_layout(layout, RANKS)
    found = assembled_states([state.within(layout) for state in states])
    assert list(found) == list(dict.fromkeys(row[0] for own in given_ for row in own))
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def changed(state, **fields):
    (tensor,) = state.layout.tensors
    values = {name: getattr(tensor, name) for name in SourceTensor.__struct_fields__} | fields
    return TrainerState(type(state.layout)(2, (), (), (SourceTensor(**values),), state.layout.explicit), (), ())


def test_what_does_not_go_together_is_named():
    whole = blocks((4,), [Box((0,), (4,)), None])
    one, two = states_of([[("w", torch.ones(4), whole)], [("w", torch.empty(0), whole)]])
    with pytest.raises(Mismatch, match=r"w is float32 \(4,\) on trainer rank 0, but bfloat16 \(4,\) on trainer rank 1"):
        union_of([one, changed(two, dtype="bfloat16")])
    halves = blocks((4,), [Box((0,), (2,)), Box((2,), (4,))])
    (half, _) = states_of([[("w", torch.ones(2), halves)]] * 2)
    (other, _) = states_of([[("x", torch.ones(2), halves)]] * 2)
    with pytest.raises(Unsupported, match=r"w: trainer ranks \[0\] list it, and 2 of its 4 elements are held by none"):
        union_of([half, other])
    thirds = blocks((4,), [Box((0,), (1,)), Box((1,), (4,))])
    (_, third) = states_of([[("w", torch.ones(1), thirds)], [("w", torch.ones(3), thirds)]])
    with pytest.raises(Mismatch, match=r"w: .* do not go together: .* overlap"):
        union_of([half, third])
    flat = ExplicitSharding((4,), flat_shard_map((4,), ((0, 0, 2), (1, 2, 4))))
    (_, piece) = states_of([[("w", torch.ones(2), flat)]] * 2)
    with pytest.raises(Unsupported, match="w is in flat buffers on some trainer ranks and not on others"):
        union_of([half, piece])
    assert half.layout.tensors[0].mesh == EXPLICIT
