"""Joined strips copy the same elements, and stacks of experts become few."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sglang_reshard.transports.strided_copies import StridedCopy, merge_strided


def elements(strips):
    """((memory, element) written, (memory, element) read), of all strips."""
    found = []
    for s in strips:
        for index in itertools.product(*map(range, s.size)):
            to = s.to_offset + sum(i * n for i, n in zip(index, s.to_strides, strict=True))
            source = s.offset + sum(i * n for i, n in zip(index, s.strides, strict=True))
            found.append(((s.to, to), (s.source, source)))
    return sorted(found)


def box(to_offset, offset, to="live", source=(0, 0), rows=2, row=4):
    return StridedCopy(to, to_offset, (row, 1), source, offset, (3 * row, 1), (rows, row), "bfloat16")


@st.composite
def many(draw):
    """Series of boxes at equal distances, some of them broken, in any order."""
    strips = []
    for number in range(draw(st.integers(1, 4))):
        to, source = draw(st.sampled_from(["a", "b"])), (draw(st.integers(0, 1)), 0)
        rows = draw(st.integers(1, 2))
        begin, step = draw(st.integers(0, 50)), draw(st.integers(0, 40))
        for i in range(draw(st.integers(1, 7))):
            jump = draw(st.sampled_from([0, 0, 0, 7]))
            strips.append(box(1000 * number + 8 * i, begin + i * step + jump, to, source, rows))
    return draw(st.permutations(strips))


@given(many())
def test_the_same_elements_go_to_the_same_places(strips):
    assert elements(merge_strided(strips)) == elements(strips)


def test_boxes_at_equal_distances_are_one_copy():
    (one,) = merge_strided([box(8 * i, 100 * i) for i in range(64)])
    assert one.size == (64, 2, 4)
    assert one.to_strides == (8, 4, 1)
    assert one.strides == (100, 12, 1)


def test_gate_and_up_that_take_turns_are_two():
    """Stacked one after the other in the engine; in the trainer's memory a down projection lies between experts."""
    experts = [box(16 * e + 8 * slot, 300 * e + 100 * slot) for e in range(8) for slot in range(2)]
    assert len(merge_strided(experts)) == 2
    assert elements(merge_strided(experts)) == elements(experts)


def test_what_has_no_order_stays_as_it_is():
    strips = [box(8 * i, at) for i, at in enumerate([0, 500, 100, 900, 50, 1000])]
    assert sorted(merge_strided(strips)) == strips


def test_different_memories_shapes_and_dtypes_are_not_mixed():
    strips = [box(0, 0), box(8, 100, to="other"), box(16, 200, source=(1, 0)), box(24, 300, rows=1)]
    strips.append(box(32, 400)._replace(dtype="float32"))
    assert len(merge_strided(strips)) == 5
