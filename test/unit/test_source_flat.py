"""Flat buffers: every rank's range is described as boxes of the members, where they are in its piece."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import Region
from sglang_reshard.layout.shard_map import ExplicitSharding, invalid_reason
from sglang_reshard.sources import FlatBuffer, FlatMember, FusedSlice, FusedTensor, describe
from sglang_reshard.sources.flat import flat_shard_map
from support.plans import assembled_states
from support.sweep import examples

NAN = float("nan")
shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def buffers(draw):
    """Members with padding between them, some of them fused; cut anywhere, some ranges held twice, some empty."""
    members, end = [], draw(st.integers(0, 3))
    for number in range(draw(st.integers(1, 4))):
        shape = draw(shapes)
        slices = draw(slices_of(f"m{number}", shape)) if len(shape) == 3 else ()
        members.append(FlatMember(f"m{number}", shape, end, slices))
        end += math.prod(shape) + draw(st.integers(0, 2))
    cuts = sorted(draw(st.lists(st.integers(0, end), max_size=4)))
    ranges = list(zip([0, *cuts], [*cuts, end], strict=True))
    ranges += draw(st.lists(st.sampled_from(ranges), max_size=2))
    ranks = draw(st.permutations(range(len(ranges))))
    return FlatBuffer(tuple(members), tuple((r, a, b) for r, (a, b) in zip(ranks, ranges, strict=True))), end


@st.composite
def slices_of(draw, name, shape):
    """Stacked experts, each in one slice or in two, transposed."""
    found = []
    half = shape[1] // 2
    for expert in range(shape[0]):
        for part, (begin, end) in enumerate([(0, shape[1])] if draw(st.booleans()) else [(0, half), (half, shape[1])]):
            axes = draw(st.sampled_from([(1, 2), (2, 1)]))
            box = (expert, begin, 0), (expert + 1, end, shape[2])
            found.append((f"{name}.{expert}.{part}", FusedSlice(*box, axes)))
    return tuple(found)


@settings(max_examples=examples(200))
@given(buffers())
def test_members_and_slices_are_found_in_the_pieces_they_are_in(made):
    buffer, end = made
    whole = torch.arange(end, dtype=torch.float32)
    ranks = len(buffer.ranges)
    expected = {}
    for member in buffer.members:
        tensor = whole[member.begin : member.begin + math.prod(member.shape)].view(member.shape)
        if not member.slices:
            expected[member.name] = tensor
        for name, part in member.slices:
            box = tensor[tuple(map(slice, part.start, part.stop))].squeeze(0)
            expected[name] = box if part.axes == (1, 2) else box.t()
    states = []
    for rank, begin, stop in sorted(buffer.ranges):
        piece = torch.cat([whole[begin:stop], torch.full((2,), NAN)])  # longer than its range
        states.append(describe([("flat", piece, buffer)], trainer_rank=rank, global_ranks=tuple(range(ranks))))
        assert all(
            s.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr() for s in states[-1].shards if s.numel()
        )
    found = assembled_states(states)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    layout = states[0].layout
    assert all(state.layout == layout for state in states)
    for tensor in layout.tensors:
        assert not invalid_reason(tensor.shape, layout.shard_map(tensor), ranks)


def one(shape, ranges, **more):
    return FlatBuffer((FlatMember("w", shape, 0, **more),), ranges)


@pytest.mark.parametrize(
    ("given_", "error", "says"),
    [
        (
            (torch.zeros(3), one((2, 3), ((0, 0, 6),))),
            Mismatch,
            "flat is a tensor of shape .3,., but .* has 6 elements",
        ),
        ((torch.zeros(2, 3), one((2, 3), ((0, 0, 6),))), Mismatch, "pass the piece itself, as a 1-D tensor"),
        ((torch.zeros(12)[::2], one((2, 3), ((0, 0, 6),))), Unsupported, r"not contiguous \(stride 2\)"),
        (
            (torch.zeros(4), one((2, 3), ((0, 0, 4),))),
            Unsupported,
            "w: the trainer ranks of this update hold only 4 of its 6",
        ),
        (
            (torch.zeros(6), one((2, 3), ((0, 0, 6),), slices=(("s", FusedSlice((0, 0), (3, 3), (0, 1))),))),
            Mismatch,
            "the slice s of its w exceeds shape",
        ),
        (
            (torch.zeros(6), FusedTensor((), ExplicitSharding((2, 3), flat_shard_map((2, 3), ((0, 0, 6),))))),
            Unsupported,
            "pass it as a member of a FlatBuffer",
        ),
    ],
)
def test_what_does_not_fit_is_named(given_, error, says):
    with pytest.raises(error, match=f"^trainer rank 0: .*{says}"):
        describe([("flat", *given_)], trainer_rank=0, global_ranks=(0,))


def test_an_explicit_sharding_may_have_flat_local_tensors():
    shard_map = flat_shard_map((2, 3), ((0, 0, 4), (1, 4, 6)))
    state = describe([("w", torch.arange(4), ExplicitSharding((2, 3), shard_map))], trainer_rank=0, global_ranks=(0, 1))
    (first, rest) = shard_map.shards_of(0)
    assert shard_map.to_local(first, Region.of(first.box)).view(state.shards[0]).tolist() == [[0, 1, 2]]
    assert shard_map.to_local(rest, Region.of(rest.box)).view(state.shards[0]).tolist() == [[3]]


@pytest.mark.parametrize("strides", [(3,), (0, 1), (1 << 50, 1)])
def test_strides_that_no_buffer_has_are_refused(strides):
    good = flat_shard_map((2, 3), ((0, 0, 6),))
    bad = type(good)(good.shards, strides)
    assert "positive strides" in invalid_reason((2, 3), bad, 1)
