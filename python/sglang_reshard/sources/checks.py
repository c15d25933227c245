"""What a given tensor has to be, so that its memory can be sent; each refusal names the tensor and the trainer rank.

`where` is both of them, "trainer rank 1: model.norm.weight".
"""

from __future__ import annotations

import math

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import ITEM_BYTES
from sglang_reshard.layout.shard_map import ExplicitSharding, ShardMap, fault
from sglang_reshard.layout.source_layout import MeshSharding, local_shapes
from sglang_reshard.sources.dtensor import DescribedTensor


def check_kind(where: str, local: torch.Tensor) -> None:
    """Raise Unsupported for a local tensor whose memory is not simply its elements."""
    if local.layout is not torch.strided:
        raise Unsupported(f"{where} is a {local.layout} tensor; send a dense one")
    if local.device.type == "meta":
        raise Unsupported(f"{where} is on the meta device and has no data; materialise it first")
    if is_traceable_wrapper_subclass(local):
        raise Unsupported(f"{where} is a {type(local).__name__}, which wraps other tensors; send those, or a plain one")
    if str(local.dtype).removeprefix("torch.") not in ITEM_BYTES:
        raise Unsupported(f"{where} has the dtype {local.dtype}, which is not carried; cast it first")
    if local.is_neg():
        raise Unsupported(f"{where} is a negated view, whose memory has the opposite signs; send its resolve_neg()")
    if local.numel() and not local.untyped_storage().nbytes():
        raise Unsupported(f"{where} has no memory any more: its storage was freed; send what is registered now")


def check_held(where: str, shape: tuple[int, ...], held: ShardMap, trainer_ranks: int, *, stated: bool) -> None:
    """Raise Mismatch for stated holdings that cannot be, and Unsupported where trainer ranks hold not all elements.

    stated  whether the holdings are a `ExplicitSharding`'s; those of a mesh are right by themselves
    """
    if stated and (why := fault(ExplicitSharding(shape, held), trainer_ranks)):
        raise Mismatch(f"{where}: what it is said to be held by cannot be: {why}")
    if held.elements() != math.prod(shape):
        raise Unsupported(
            f"{where}: the trainer ranks of this update hold {held.elements()} of its {math.prod(shape)} elements; "
            "give the sender all ranks that hold parts of the tensor (of its mesh, if it has one)"
        )


def as_held(where: str, described: DescribedTensor, trainer_rank: int) -> torch.Tensor:
    """The local tensor in the shape that its distribution says (verl hands it out flat), or Mismatch."""
    shape, distribution, local = described
    local = local.detach()
    if isinstance(distribution, MeshSharding):
        expected = local_shapes(shape, *distribution).get(trainer_rank, (0,))
        if tuple(local.shape) == expected:
            return local
        if local.numel() == math.prod(expected) and (local.dim() == 1 or local.numel() == 0):
            return local.view(expected)
        raise Mismatch(
            f"{where} has a local shard of shape {tuple(local.shape)}, but its placements over shape {shape} make it "
            f"{expected}; was it resharded without its placements?"
        )
    extent = distribution.extent(trainer_rank)
    if extent is None:
        return local.new_empty(0)
    if local.dim() == len(extent) and all(n <= m for n, m in zip(extent, local.shape, strict=True)):
        return local
    if local.dim() == 1 and local.numel() == math.prod(extent):
        return local.view(extent)
    raise Mismatch(
        f"{where} has a local tensor of shape {tuple(local.shape)}, but the pieces that this rank is said to hold of "
        f"its shape {shape} reach to {extent} there; give the tensor that they were counted in"
    )
