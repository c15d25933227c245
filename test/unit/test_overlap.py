"""Targets that share memory are refused by name, to the byte, as torch's copy_ refuses an expanded one."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_reshard.errors import Mismatch
from sglang_reshard.memory.overlap import Written, written_once


def never(a, b):
    return False


def check(*named, tied=never):
    return written_once([Written.of(name, tensor) for name, tensor in named], tied, "trainer rank 0: ")


@st.composite
def views(draw):
    """Shape, strides and offset in a memory of 64 elements; some of few elements, some that overlap themselves."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)))
    strides = tuple(draw(st.integers(0, 7)) for _ in shape)
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return shape, strides, draw(st.integers(0, 63 - reach))


@given(st.lists(views(), min_size=1, max_size=4))
def test_two_elements_in_one_place_are_found_and_no_others(found):
    memory = torch.arange(64)
    placed = [memory.as_strided(*view) for view in found]
    elements = [element for view in placed for element in view.flatten().tolist()]
    named = [(f"t{number}", view) for number, view in enumerate(placed)]
    if len(set(elements)) == len(elements):
        assert check(*named) == list(range(len(named)))
    else:
        with pytest.raises(Mismatch, match=r"trainer rank 0: .*share memory"):
            check(*named)


def test_both_names_are_said():
    memory = torch.zeros(8)
    with pytest.raises(Mismatch, match="b and c of the target share memory"):
        check(("a", memory[:3]), ("b", memory[3:6]), ("c", memory[5:]))
    with pytest.raises(Mismatch, match=r"e of the target has elements that share memory .*clone\(\)"):
        check(("e", torch.zeros(1).expand(3)))
    with pytest.raises(Mismatch, match="a and b of the target share memory"):
        check(("a", memory), ("b", memory.view(torch.int32)))


def test_one_tensor_under_tied_names_is_written_once():
    memory = torch.zeros(2, 4)
    names = [("a", memory), ("b", torch.zeros(3)), ("c", memory[:, :]), ("d", memory.view(1, 2, 4)[0])]
    assert check(*names, tied=lambda a, b: {a, b} <= {"a", "c", "d"}) == [0, 1]
    with pytest.raises(Mismatch, match="a and c of the target"):
        check(*names, tied=never)
    with pytest.raises(Mismatch, match="a and b of the target"):  # a part of it is no tie
        check(("a", memory), ("b", memory[0]), tied=lambda a, b: True)


def test_many_tensors_take_little_time():
    memory = torch.zeros(100_000, 2)
    named = [(f"t{number}", row) for number, row in enumerate(memory)]
    written = [Written.of(name, row) for name, row in named]
    began = time.process_time()
    assert len(written_once(written, never, "")) == len(named)
    assert time.process_time() - began < 10  # seconds; comparing all pairs would take hours
