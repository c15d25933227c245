"""Merged copies copy the same elements, and fused experts become few copies."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sglang_reshard.copying.merging import StridedCopy, merge_strided


def elements(copies):
    """((memory, element) written, (memory, element) read), of all copies."""
    found = []
    for s in copies:
        for index in itertools.product(*map(range, s.size)):
            to = s.target_offset + sum(i * n for i, n in zip(index, s.target_strides, strict=True))
            source = s.source_offset + sum(i * n for i, n in zip(index, s.source_strides, strict=True))
            found.append(((s.target, to), (s.source, source)))
    return sorted(found)


def box(target_offset, offset, target="live", source=(0, 0), rows=2, row=4):
    return StridedCopy(target, target_offset, (row, 1), source, offset, (3 * row, 1), (rows, row), "bfloat16")


@st.composite
def many(draw):
    """Series of boxes at equal distances, some of them broken, in any order."""
    copies = []
    for number in range(draw(st.integers(1, 4))):
        target, source = draw(st.sampled_from(["a", "b"])), (draw(st.integers(0, 1)), 0)
        rows = draw(st.integers(1, 2))
        begin, step = draw(st.integers(0, 50)), draw(st.integers(0, 40))
        for i in range(draw(st.integers(1, 7))):
            jump = draw(st.sampled_from([0, 0, 0, 7]))
            copies.append(box(1000 * number + 8 * i, begin + i * step + jump, target, source, rows))
    return draw(st.permutations(copies))


@given(many())
def test_the_same_elements_go_to_the_same_places(copies):
    assert elements(merge_strided(copies)) == elements(copies)


def test_boxes_at_equal_distances_are_one_copy():
    (one,) = merge_strided([box(8 * i, 100 * i) for i in range(64)])
    assert one.size == (64, 2, 4)
    assert one.target_strides == (8, 4, 1)
    assert one.source_strides == (100, 12, 1)


def test_gate_and_up_that_take_turns_are_one_copy():
    """Stacked one after the other in the engine; in the trainer's memory a down projection lies between experts."""
    experts = [box(16 * e + 8 * slot, 300 * e + 100 * slot) for e in range(8) for slot in range(2)]
    (one,) = merge_strided(experts)
    assert one.size == (8, 2, 2, 4)
    assert elements([one]) == elements(experts)


def test_different_memories_shapes_and_dtypes_are_not_mixed():
    copies = [box(0, 0), box(8, 100, target="other"), box(16, 200, source=(1, 0)), box(24, 300, rows=1)]
    copies.append(box(32, 400)._replace(dtype="float32"))
    assert len(merge_strided(copies)) == 5
