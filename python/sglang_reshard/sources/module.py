"""Lists a module's weights on this rank, however its parameters are sharded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources.memory_identity import is_flattened
from sglang_reshard.torch_private import persistent_buffers


def named_shards(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yields a module's weights as `describe` takes them: parameters, then persistent buffers.

    FSDP2's parameters are yielded as sharded DTensors, also while they are unsharded. FSDP1's are yielded as this
    rank's pieces of the flat parameters, each with its `FlatBuffer`, in full precision; all other parameters as they
    are. Tied parameters are yielded once, under their first name, as by `named_parameters`.

    Raises Unsupported for a torch version that keeps the state of FSDP1 or FSDP2 elsewhere.
    """
    if "torch.distributed.fsdp" in sys.modules:
        yield from _of_fsdp(module)
        return
    yield from module.named_parameters()
    yield from persistent_buffers(module)


def _of_fsdp(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yields the weights of a module that FSDP may wrap."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    from sglang_reshard.sources.fsdp import ShardedParameters
    from sglang_reshard.sources.fsdp1 import clean_name, flat_shards

    flattened: set[str] = set()
    wrapped = any(isinstance(part, FullyShardedDataParallel) for part in module.modules())
    if wrapped:
        for name, piece, buffer in flat_shards(module):
            flattened.update(member.name for member in buffer.members)
            yield name, piece, buffer
    try:
        sharded = ShardedParameters(p._get_fsdp_state() for p in module.modules() if isinstance(p, FSDPModule))
    except AttributeError as error:
        raise Unsupported(
            f"named_shards does not support torch {torch.__version__}: FSDP2 keeps its sharded parameters elsewhere "
            f"({error}). Call reshard() on every FSDPModule of the model, and pass model.named_parameters() instead"
        ) from error
    for name, parameter in module.named_parameters():
        if not wrapped:
            yield name, sharded.of(name, parameter)
        elif not is_flattened(parameter) and (cleaned := clean_name(name)) not in flattened:
            yield cleaned, sharded.of(name, parameter)
    for name, tensor in persistent_buffers(module):
        yield clean_name(name) if wrapped else name, tensor
