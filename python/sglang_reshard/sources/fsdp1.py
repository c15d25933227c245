"""Reads FSDP1 (`FullyShardedDataParallel`): the flat parameters' sharded pieces, in place.

FSDP1 flattens the parameters of a wrapped module into one flat parameter and gives each rank of the sharding group an
equal range of it, in full precision also under mixed precision. Its `state_dict` would gather every module; the pieces
themselves are read here, in any state of the unsharded copies, before the first forward too.

Their state is private to torch; this is the only module that reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources.dtensor import on_root_mesh
from sglang_reshard.sources.flat import FlatBuffer, FlatMember, equal_ranges

# By FSDP1's handle of a flat parameter, with the name of its module. The same object tells that nothing has changed.
_buffers: WeakKeyDictionary[Any, tuple[str, FlatBuffer]] = WeakKeyDictionary()


def flat_shards(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, FlatBuffer]]:
    """Yields every FSDP1 flat parameter under `module`: its name, this rank's piece, and its members.

    Members have their names in the original module. Tied parameters are members once, under their first name. Raises
    Unsupported for a torch version that keeps FSDP1's state elsewhere.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    try:
        for path, part in module.named_modules():
            handle = part._handle if isinstance(part, FullyShardedDataParallel) else None
            if handle is None:  # a wrapper whose parameters all belong to others
                continue
            prefix = clean_name(f"{path}." if path else "")
            known = _buffers.get(handle)
            if known is None or known[0] != prefix:
                known = _buffers[handle] = prefix, FlatBuffer(_members(prefix, handle), _ranges(part, handle))
            parameter = handle.flat_param
            piece = getattr(parameter, "_local_shard", None)  # set by the first forward
            yield f"{prefix}_flat_param", parameter.detach() if piece is None else piece, known[1]
    except AttributeError as error:
        raise Unsupported(
            f"torch {torch.__version__} is not supported: FSDP1 keeps its sharded parameters elsewhere ({error}). Pass "
            "(name, piece, FlatBuffer) for every flat parameter"
        ) from error


def clean_name(name: str) -> str:
    """Returns a parameter's name in the original module, without the names of FSDP1's and checkpointing's wrappers."""
    from torch.distributed.fsdp._common_utils import clean_tensor_name

    return str(clean_tensor_name(name))


def _members(prefix: str, handle: Any) -> tuple[FlatMember, ...]:
    flat = handle.flat_param
    begins = itertools.accumulate(flat._numels_with_padding, initial=0)
    tensors = (begin for begin, padding in zip(begins, flat._is_padding_mask, strict=False) if not padding)
    return tuple(
        FlatMember(clean_name(prefix + name), tuple(shape), begin)
        for name, shape, begin in zip(flat._fqns, flat._shapes, tensors, strict=True)
    )


def _ranges(part: Any, handle: Any) -> tuple[tuple[int, int, int], ...]:
    """Returns the range of the flat parameter that each rank of all sharding groups holds."""
    total = sum(handle.flat_param._numels_with_padding)
    if not handle.uses_sharded_strategy:
        return tuple((rank, 0, total) for rank in dist.get_process_group_ranks(part.process_group))
    return equal_ranges(_sharding_groups(part), handle.flat_param._sharded_size.numel(), total)


def _sharding_groups(part: Any) -> list[list[int]]:
    """Returns the global ranks of each group that shards the module among its members: one, or each one's replicas."""
    own, replicas = dist.get_process_group_ranks(part.process_group), getattr(part, "_inter_node_pg", None)
    mesh = getattr(part, "_device_mesh", None)
    if mesh is not None:
        ranks, shards = on_root_mesh(mesh, (True,) if replicas is None else (False, True), False)
        dim = shards.index(True)
        groups: list[list[int]] = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
        return groups
    if replicas is None:
        return [own]
    here = dist.get_rank()  # without a mesh, hosts have the same number of ranks, one after the other
    return [[rank - here + replica for rank in own] for replica in dist.get_process_group_ranks(replicas)]
