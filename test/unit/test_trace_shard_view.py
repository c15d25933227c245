"""Some view of a shard has the checkpoint tensor's boxes as boxes, wherever one can, and no copy is made for it."""

import contextlib

import pytest
import torch
from hypothesis import given, settings

from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.converter_trace import trace_converter
from sglang_reshard.trace.live_shards import shard_view
from support.moves import ELSEWHERE, chained, chains, counted, elsewhere, halves_joined, heads_picked, shapes
from support.sweep import examples


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
