"""Boxes and regions intersect and split as sets of indices do."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_reshard.layout.regions import Box, Region, split

DIMS = st.integers(0, 3)


@st.composite
def boxes(draw, dims, lowest=0):
    start = tuple(draw(st.integers(0, 5)) for _ in range(dims))
    return Box(start, tuple(a + draw(st.integers(lowest, 5)) for a in start))


@st.composite
def regions(draw, dims):
    def numbers(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    return Region(numbers(0, 5), numbers(1, 5), numbers(1, 3))


def indices(box):
    return set(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


def region_indices(region):
    axes = zip(region.start, region.count, region.step, strict=True)
    return list(itertools.product(*([a + i * s for i in range(n)] for a, n, s in axes)))


@given(st.data(), DIMS)
def test_boxes_intersect_as_sets(data, dims):
    a, b = data.draw(boxes(dims)), data.draw(boxes(dims))
    common = a.intersect(b)
    assert (indices(common) if common else set()) == indices(a) & indices(b)
    assert a.numel == len(indices(a))


@given(st.data(), DIMS)
def test_a_region_inside_a_box_keeps_its_elements_and_counts_what_it_skips(data, dims):
    region, box = data.draw(regions(dims)), data.draw(boxes(dims))
    expected = [i for i in region_indices(region) if i in indices(box)]
    common = region.intersect(box)
    if common is None:
        assert expected == []
        return
    inside, skipped = common
    assert region_indices(inside) == expected
    first = tuple(a + n * s for a, n, s in zip(region.start, skipped, region.step, strict=True))
    assert first == inside.start


@given(st.data(), DIMS, st.integers(1, 40))
def test_split_covers_a_box_once_in_row_major_order(data, dims, limit):
    box = data.draw(boxes(dims, lowest=1))
    parts = list(split(box, limit))
    assert all(p.numel <= limit for p in parts)
    in_order = [i for p in parts for i in sorted(indices(p))]
    assert in_order == sorted(indices(box))


def test_split_refuses_no_elements():
    with pytest.raises(ValueError, match="at least 1"):
        list(split(Box.whole((2,)), 0))
