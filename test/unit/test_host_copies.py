"""Copies in host memory are those of torch, wherever storages are when they run."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.copying.copy_list import CopyList
from support.sweep import examples


def list_of(pairs, movable=()):
    copies = CopyList(movable)
    for destination, source in pairs:
        copies.add(destination, source)
    copies.build()
    return copies


DTYPES = [torch.int8, torch.bfloat16, torch.uint16, torch.float32, torch.uint32, torch.int64, torch.uint64]


@st.composite
def pairs_of_views(draw):
    """Views of two storages, in pairs of one shape: slices of rows, columns and steps, of one dtype or cast."""
    dtype = draw(st.sampled_from(DTYPES))
    kept = draw(st.sampled_from([dtype, torch.float32]))
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    source, destination = (
        torch.arange(rows * columns).view(rows, columns).to(dtype),
        torch.zeros(rows, columns).to(kept),
    )
    step = draw(st.integers(1, 3))
    cuts = sorted(draw(st.sets(st.integers(0, rows), max_size=4)) | {0, rows})
    order = draw(st.permutations(list(itertools.pairwise(cuts))))
    pairs = [(destination[a:b, ::step], source[a:b, ::step]) for a, b in order]
    if draw(st.booleans()):
        pairs = [(d.t(), s.t()) for d, s in pairs]
    return source, destination, step, pairs


@given(pairs_of_views())
@settings(max_examples=examples(150), deadline=None)
def test_what_is_copied_is_what_torch_copies(drawn):
    source, destination, step, pairs = drawn
    expected = torch.zeros_like(destination)
    expected[:, ::step].copy_(source[:, ::step])
    list_of(pairs).run()
    assert torch.equal(destination, expected)


@pytest.mark.parametrize("moved", ["source", "destination", "both"])
@pytest.mark.parametrize("elements", [4, 100_000])  # numpy and torch copy them
def test_storages_that_are_moved_in_place_are_followed(moved, elements):
    source, destination = torch.zeros(3, elements), torch.zeros(3, elements)
    copies = list_of(zip(destination, source, strict=True), movable=(source, destination))
    copies.run()
    for name, tensor in (("source", source), ("destination", destination)):
        if moved in (name, "both"):
            address = tensor.data_ptr()
            tensor.untyped_storage().share_memory_()
            assert tensor.data_ptr() != address
    source += torch.arange(3.0)[:, None] + 1
    copies.run()
    assert torch.equal(destination, source)
    source += 1
    copies.run()  # nothing has moved since
    assert torch.equal(destination, source)
