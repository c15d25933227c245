"""Copies in host memory follow storages that are moved in place."""

import pytest
import torch

from sglang_reshard.copying.copy_list import CopyList


@pytest.mark.parametrize("moved", ["source", "destination", "both"])
@pytest.mark.parametrize("elements", [4, 100_000])  # numpy and torch copy them
def test_storages_that_are_moved_in_place_are_followed(moved, elements):
    source, destination = torch.zeros(3, elements), torch.zeros(3, elements)
    copies = CopyList(movable=(source, destination))
    for pair in zip(destination, source, strict=True):
        copies.add(*pair)
    copies.build()
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
