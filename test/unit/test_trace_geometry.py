"""A strided view of a contiguous tensor, and the boxes it is rewritten as, are the same elements."""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.trace.geometry import Geometry, IndexMap, Loop, TooFragmented, grid_shape, intersection, to_boxes
from support.sweep import examples


def geometry_of(tensor):
    return Geometry(tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def pairs(index_map):
    """Every (element read, element written), by brute force."""
    return sorted(
        (
            index_map.read + sum(i * loop.read for i, loop in zip(index, index_map.loops, strict=True)),
            index_map.write + sum(i * loop.write for i, loop in zip(index, index_map.loops, strict=True)),
        )
        for index in itertools.product(*(range(loop.size) for loop in index_map.loops))
    )


def pairs_of(boxes, shape):
    return sorted(pair for box in boxes for pair in pairs(box.index_map(shape)))


@st.composite
def views(draw):
    """A contiguous tensor of few elements, and what some view operations made of it."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    view = tensor
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["narrow", "step", "transpose", "unflatten", "flatten", "select", "expand"]))
        dim = draw(st.integers(0, view.dim() - 1)) if view.dim() else None
        if dim is None:
            break
        size = view.size(dim)
        if kind == "narrow":
            start = draw(st.integers(0, size - 1))
            view = view.narrow(dim, start, draw(st.integers(1, size - start)))
        elif kind == "step":
            index = [slice(None)] * view.dim()
            index[dim] = slice(draw(st.integers(0, size - 1)), None, draw(st.integers(1, 3)))
            view = view[tuple(index)]
        elif kind == "transpose":
            view = view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
        elif kind == "unflatten":
            factor = draw(st.sampled_from([f for f in range(1, size + 1) if size % f == 0]))
            view = view.unflatten(dim, (factor, size // factor))
        elif kind == "flatten" and dim + 1 < view.dim():
            with contextlib.suppress(RuntimeError):  # not any two dimensions can be viewed as one
                view = view.view(*view.shape[:dim], size * view.size(dim + 1), *view.shape[dim + 2 :])
        elif kind == "select":
            view = view.select(dim, draw(st.integers(0, size - 1)))
        elif kind == "expand" and size == 1:
            view = view.expand(*view.shape[:dim], 3, *view.shape[dim + 1 :])
    return tensor, view


@settings(max_examples=examples(500))
@given(views(), st.randoms(use_true_random=False), st.booleans())
def test_boxes_of_a_view_are_its_elements(drawn, random, unit_steps):
    tensor, view = drawn
    order = list(range(view.dim()))
    random.shuffle(order)
    into = torch.empty([view.size(d) for d in order]).permute([order.index(d) for d in range(view.dim())])
    index_map = IndexMap.between(geometry_of(view), geometry_of(into))
    boxes = to_boxes(index_map, tuple(tensor.shape), unit_steps=unit_steps)
    assert pairs_of(boxes, tensor.shape) == pairs(index_map)
    assert not unit_steps or all(set(x.step) == {1} for x in boxes)
    # What a Copy does with them.
    got = torch.full((max(1, into.numel()),), -1)
    for x in boxes:
        index = tuple(slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(x.start, x.size, x.step, strict=True))
        got.as_strided(x.size, x.stride, x.write).copy_(tensor[index])
    assert torch.equal(got.as_strided(into.shape, into.stride(), 0), view)


@settings(max_examples=examples(200))
@given(views(), views())
def test_common_boxes_on_a_grid_are_the_common_elements(one, other):
    """Two views of one storage, however they are strided, compared as boxes of one grid."""
    a, b = geometry_of(one[1]), geometry_of(other[1])
    numel = max(one[0].numel(), other[0].numel())
    shape = grid_shape(numel, (*a.stride, *b.stride))
    mine, theirs = (to_boxes(IndexMap.flattening(g), shape, unit_steps=True) for g in (a, b))
    elements = {
        read
        for x, y in itertools.product(mine, theirs)
        if (common := intersection(x, y))
        for read, _ in pairs(x.narrow(*common).index_map(shape))
    }
    assert elements == {r for r, _ in pairs(IndexMap.flattening(a))} & {r for r, _ in pairs(IndexMap.flattening(b))}


@settings(max_examples=examples(200))
@given(st.data())
def test_what_is_left_of_a_box(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    box = to_boxes(IndexMap.flattening(Geometry.contiguous(shape)), shape)
    if not box:
        return
    (box,) = to_boxes(IndexMap.flattening(Geometry.contiguous(shape)), shape, unit_steps=True)
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True))
    parts = [*box.subtract(start, size), box.narrow(start, size)]
    assert pairs_of(parts, shape) == pairs_of([box], shape)


def test_a_map_of_too_many_boxes_is_refused():
    index_map = IndexMap(0, 0, (Loop(70_000, 3, 1), Loop(2, 1, 100_000)))
    with pytest.raises(TooFragmented):
        to_boxes(index_map, (210_001,))
