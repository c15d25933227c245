"""What a function that only moves elements does with them is found without their bytes, exactly, or refused.

Some view of a shard has the checkpoint tensor's boxes as boxes, wherever one can, and no copy is made for it.
"""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given, settings

from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.converter_trace import trace_converter
from sglang_reshard.trace.live_shards import shard_view
from support.moves import ELSEWHERE, chained, chains, counted, elsewhere, halves_joined, heads_picked, shapes
from support.sweep import examples


def boxes_that_agree(function, shape):
    """The boxes of each result, by name, compared with what the function does to real elements."""
    truth, found = function(counted(shape)), trace_converter(function, shape, torch.int64)
    assert list(found) == list(truth)
    for name, wanted in truth.items():
        traced = torch.full(wanted.shape, ELSEWHERE)
        for box in found[name].boxes:
            assert set(box.step) <= {1}
            for index in itertools.product(*map(range, box.size)):
                place = tuple(a + i for a, i in zip(box.start, index, strict=True))
                assert traced[place] == ELSEWHERE
                traced[place] = box.write + sum(i * s for i, s in zip(index, box.stride, strict=True))
        assert torch.equal(traced, wanted), name
    return {name: result.boxes for name, result in found.items()}


@pytest.mark.parametrize(
    ("function", "shape", "boxes"),
    [
        (lambda x: {"itself": x}, (3, 4), 1),
        (lambda x: {"rows": torch.cat([elsewhere(x), x])}, (3, 4), 1),
        (lambda x: {"columns": torch.cat([elsewhere(x), x], dim=1)}, (3, 4), 1),
        (lambda x: {"vocabulary": torch.cat([elsewhere(x), x])[:5]}, (3, 4), 1),
        (lambda x: {"vocabulary": torch.cat([x, elsewhere(x)])[:2]}, (3, 4), 1),
        (halves_joined, (6, 5), 2),
        (heads_picked, (12, 5), 3),
        (lambda x: {"transposed": x.permute(1, 0).contiguous()}, (3, 4), 1),
        (lambda x: {"stacked": torch.stack([x, x])}, (3, 4), 2),
        (lambda x: {"interleaved": x.view(2, 3, 4).transpose(0, 1).reshape(6, 4)}, (6, 4), 3),
        (lambda x: {"masked": x[:, torch.tensor([True, False, True, True])]}, (3, 4), 2),
        (lambda x: {"from the end": x[:, torch.tensor([-1, 0])]}, (3, 4), 2),
        (lambda x: {"last dimension": x.index_select(-1, torch.tensor([3, 0, 1]))}, (3, 4), 2),
        (lambda x: {"scalar": x}, (), 1),
        (lambda x: {"nothing": x[:0], "of others": elsewhere(x)}, (3, 4), 0),
    ],
)
def test_moved_elements_are_found_in_few_boxes(function, shape, boxes):
    assert sum(map(len, boxes_that_agree(function, shape).values())) == boxes


@settings(max_examples=examples(60))
@given(shapes, chains)
def test_any_chain_of_moves_is_followed(shape, moves):
    boxes_that_agree(chained(moves), shape)


def test_nothing_of_the_tensors_size_is_allocated():
    found = trace_converter(halves_joined, (2**21, 2**15), torch.bfloat16)  # 128 GiB, and three times that
    assert [(b.start, b.size, b.write) for b in found["up"].boxes] == [((2**20, 0), (2**20, 2**15), 2**35)]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: {"t": x + 1}, "the converter does arithmetic on t"),
        (lambda x: {"t": torch.cat([x, x * 2])}, "the converter does arithmetic on t"),
        (lambda x: {"t": x.to(torch.float32)}, "casts t, whose elements are torch.bfloat16"),
        (lambda x: {"t": x.view(torch.int16)}, "casts t, whose elements are torch.bfloat16"),
        (lambda x: {"t": x if x.sum() > 0 else -x}, "derived"),
        (lambda x: {"t": torch.empty_like(x)}, "the converter does arithmetic on t"),
        # Picked by an index that is too irregular, is not known (torch makes a list one of x's device), is too large.
        (lambda x: {"t": x[torch.arange(2**14) ** 2 % 4]}, "the converter does arithmetic on t"),
        (lambda x: {"t": x[[0, 3]]}, "the converter does arithmetic on t"),
        (lambda x: {"t": x[torch.tensor([0, 4])]}, "the converter does arithmetic on t"),
    ],
)
def test_what_is_more_than_moving_is_refused(function, why):
    with pytest.raises(Unsupported, match=why):
        trace_converter(function, (4, 4), torch.bfloat16)


# -- views of shards


def views_that_agree(function, shape):
    """The view for each result of which the shard holds something; put together from its boxes, it is the result."""
    shard = counted(shape)
    for name, result in trace_converter(function, shape, torch.int64).items():
        if not result.boxes:
            continue
        seen = torch.full(result.shape, ELSEWHERE)
        view, starts = shard_view(result.boxes, shape)
        local = shard if view is None else shard.as_strided(view.size, view.stride, view.offset)
        for box, at in zip(result.boxes, starts, strict=True):
            inside = tuple(slice(a, a + n) for a, n in zip(at, box.size, strict=True))
            seen[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))] = local[inside]
        assert torch.equal(seen, function(shard)[name]), name
        yield view


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (halves_joined, (6, 5)),
        (heads_picked, (12, 5)),
        (lambda x: {"columns": torch.cat([elsewhere(x), x], dim=1)}, (3, 4)),
        (lambda x: {"bias": torch.cat([elsewhere(x), x])}, (4,)),
        (lambda x: {"one row": x[2:3]}, (3, 4)),
        (lambda x: {"thin": x[1:, :, 1:2]}, (4, 1, 3)),
        (lambda x: {"scalar": x}, ()),
    ],
)
def test_a_shard_that_lies_as_the_checkpoint_does_is_its_own_view(function, shape):
    assert set(views_that_agree(function, shape)) == {None}


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: {"transposed": x.t()}, (3, 4)),
        (lambda x: {"transposed, one of two": torch.cat([elsewhere(x).t(), x.t()])}, (3, 4)),
        (lambda x: {"gate": x[::2], "up": x[1::2]}, (6, 4)),
        (lambda x: {"gate": x[:, ::2], "up": x[:, 1::2]}, (3, 6)),
        (lambda x: {"stacked": x[None]}, (3, 4)),
        (lambda x: {"as a vector": x.reshape(-1)}, (3, 4)),
        (lambda x: {"as a matrix": x.view(3, 4)}, (12,)),
        (lambda x: {"one element": x[1, 2]}, (3, 4)),
        (lambda x: {"turned": x.permute(2, 0, 1)}, (2, 3, 4)),
        (lambda x: {"one expert": x[1]}, (2, 3, 4)),
    ],
)
def test_another_view_of_the_same_memory_lies_as_the_checkpoint_does(function, shape):
    views = list(views_that_agree(function, shape))
    assert views
    assert None not in views


@pytest.mark.parametrize(
    "function",
    [
        lambda x: {"t": torch.cat([x, x.t()])},
        lambda x: {"t": x.view(-1).expand(3, 16)},
        lambda x: {"t": torch.cat([x.view(-1)[1:6:2], x.view(-1)[2:7:2]])},
    ],
)
def test_what_lies_in_two_ways_is_refused(function):
    (result,) = trace_converter(function, (4, 4), torch.int64).values()
    with pytest.raises(Unsupported):
        shard_view(result.boxes, (4, 4))


@settings(max_examples=examples(60))
@given(shapes, chains)
def test_a_view_that_is_found_is_right(shape, moves):
    with contextlib.suppress(Unsupported):
        list(views_that_agree(chained(moves), shape))
