"""What one-sided reads fetch, by brute force: the runs hold every element of the region, where `strides` say."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_reshard.routes.runs import plan_runs


@st.composite
def regions(draw):
    """Shape and strides of a region of a tensor, some dimensions swapped, some cut, some with steps."""
    count = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    order = draw(st.permutations(range(len(count))))
    strides, step = [0] * len(count), draw(st.integers(1, 3))
    for dim in order:
        strides[dim] = step
        step *= count[dim] + draw(st.integers(0, 3))
    return count, tuple(strides)


def memory_of(count, strides):
    indices = np.indices(count).reshape(len(count), math.prod(count))
    return (np.array(strides, int)[:, None] * indices).sum(axis=0)


@given(regions(), st.sampled_from([1, 2, 4]), st.sampled_from([0, 8, 1000]), st.sampled_from([1.0, 1.5, 8.0, math.inf]))
def test_runs_hold_every_element_where_their_strides_say(region, item_bytes, descriptor_bytes, max_ratio):
    count, strides = region
    runs = plan_runs(count, strides, item_bytes, descriptor_bytes, max_ratio)
    assert runs.nbytes % item_bytes == 0
    fetched = [a // item_bytes + np.arange(runs.nbytes // item_bytes) for a in runs.offsets]
    packed = np.concatenate(fetched)  # packed position -> element of memory
    assert (packed[memory_of(count, runs.strides)] == memory_of(count, strides)).all()
    assert runs.total_bytes <= max_ratio * math.prod(count) * item_bytes
    if runs.is_row_major(count):
        assert (packed == memory_of(count, strides)).all()


@given(regions())
def test_nothing_else_is_read_where_descriptors_cost_nothing(region):
    count, strides = region
    assert plan_runs(count, strides, 2, 0).total_bytes == 2 * math.prod(count)


def test_long_rows_are_read_apart_and_short_ones_with_what_is_between():
    long = plan_runs((4, 8192), (4 * 8192, 1), 2, 8192)
    assert (len(long.offsets), long.nbytes) == (4, 16384)
    short = plan_runs((4, 64), (4 * 64, 1), 2, 8192)
    assert (len(short.offsets), short.nbytes) == (1, (3 * 256 + 64) * 2)
    assert not short.is_row_major((4, 64))


def test_a_limit_on_what_is_read_in_vain_is_kept():
    runs = plan_runs((100, 1), (64, 1), 2, 8192, max_ratio=8.0)
    assert len(runs.offsets) == 100
