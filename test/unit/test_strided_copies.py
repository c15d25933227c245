"""Merged copies copy the same elements, and fused experts become few copies."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sglang_reshard.copying.host_copies import is_ascending, merged_boxes


def elements(boxes):
    """(memories, element written, element read), of all boxes."""
    found = []
    for kind, dimensions, (to, source) in boxes:
        for index in itertools.product(*(range(n) for n, _, _ in dimensions)):
            steps = list(zip(index, dimensions, strict=True))
            written, read = (at + sum(i * d[side] for i, d in steps) for side, at in ((2, to), (1, source)))
            found.append((kind, written, read))
    return sorted(found)


def box(to, source, memories="live", rows=2, row=4):
    return memories, ((rows, 3 * row, row), (row, 1, 1)), (to, source)


def merged(boxes):
    by_kind = {}
    for kind, dimensions, point in boxes:
        by_kind.setdefault((kind, dimensions), []).append(point)
    return list(merged_boxes(by_kind, is_ascending))


@st.composite
def many(draw):
    """Series of boxes at equal distances, some of them broken, in any order."""
    copies = []
    for number in range(draw(st.integers(1, 4))):
        memories = draw(st.sampled_from(["a", "b", "c"]))
        rows = draw(st.integers(1, 2))
        begin, step = draw(st.integers(0, 50)), draw(st.integers(0, 40))
        for i in range(draw(st.integers(1, 7))):
            jump = draw(st.sampled_from([0, 0, 0, 7]))
            copies.append(box(1000 * number + 8 * i, begin + i * step + jump, memories, rows))
    return draw(st.permutations(copies))


@given(many())
def test_the_same_elements_go_to_the_same_places(copies):
    assert elements(merged(copies)) == elements(copies)


def test_boxes_at_equal_distances_are_one_copy():
    (one,) = merged([box(8 * i, 100 * i) for i in range(64)])
    assert one == ("live", ((64, 100, 8), (2, 12, 4), (4, 1, 1)), (0, 0))


def test_gate_and_up_that_take_turns_are_one_copy():
    """Stacked one after the other in the engine; in the trainer's memory a down projection lies between experts."""
    experts = [box(16 * e + 8 * slot, 300 * e + 100 * slot) for e in range(8) for slot in range(2)]
    (one,) = merged(experts)
    assert [n for n, _, _ in one[1]] == [8, 2, 2, 4]
    assert elements([one]) == elements(experts)


def test_different_memories_and_shapes_are_not_mixed():
    assert len(merged([box(0, 0), box(8, 100, memories="other"), box(24, 300, rows=1)])) == 3
