"""Finds FSDP2's sharded parameters, also while their modules are unsharded.

Between a forward and the next backward FSDP2 keeps its root's parameters unsharded: `named_parameters` then yields
plain tensors, gathered before the forward. They are copies, rounded to `param_dtype` under mixed precision and stale
after the next optimizer step. The sharded parameters, which optimizers write, stay in FSDP2's state. They are read
there without changing anything, so that it is safe at any time, in a forward or backward too. `FSDPModule.reshard` is
public, but frees memory that may be in use.

FSDP2's state is private to torch; this is the only module that reads it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sglang_reshard.errors import Unsupported

logger = logging.getLogger(__name__)


class ShardedParameters:
    """Maps the unsharded copies that FSDP2 has registered to their sharded parameters."""

    def __init__(self, states: Iterable[Any]) -> None:
        self._by_copy: dict[int, DTensor] = {}
        # By the address of the copy's storage, for views of it; freed storages have no address.
        self._by_storage: dict[int, tuple[torch.Tensor, DTensor]] = {}
        for state in {id(s): s for s in states}.values():
            for parameter in _parameters(state):
                for name in ("_unsharded_param", "_sharded_post_forward_param"):
                    copy = getattr(parameter, name, None)  # set by the first forward
                    if copy is None:
                        continue
                    self._by_copy[id(copy)] = parameter.sharded_param
                    address = _address(copy)
                    if address:
                        self._by_storage[address] = copy, parameter.sharded_param

    @classmethod
    def of_this_process(cls) -> ShardedParameters:
        """Covers all live FSDP2 modules; none, with a warning, if torch keeps its registry of them elsewhere."""
        if "torch.distributed.fsdp" not in sys.modules:
            return cls(())
        try:
            from torch.distributed._composable_state import _module_state_mapping as registry
            from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

            states = [reference() for reference in list(registry.values())]
            return cls(s for s in states if isinstance(s, FSDPState))
        except (ImportError, AttributeError) as error:
            logger.warning(
                "torch %s is not supported here: it keeps FSDP2's state elsewhere (%s), so unsharded parameters are "
                "not recognized. Call reshard() on every FSDPModule before an update",
                torch.__version__,
                error,
            )
            return cls(())

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sharded parameter if `tensor` is FSDP2's unsharded copy of it, or `tensor` itself.

        Raises Unsupported for a partial view of such a copy.
        """
        if not self._by_copy:
            return tensor
        sharded = self._by_copy.get(id(tensor))
        if sharded is not None:
            return sharded
        address = _address(tensor)
        copy, sharded = self._by_storage.get(address, (None, None))
        if copy is None or sharded is None or _address(copy) != address:  # freed, and its address is reused
            return tensor
        if tensor.shape == copy.shape and tensor.stride() == copy.stride():
            return sharded  # parameter.data, parameter.detach()
        raise Unsupported(
            f"{name} is a view of FSDP2's unsharded copy of a parameter of shape {tuple(copy.shape)}, which optimizer "
            "steps do not update. Pass the view of the sharded parameter, which "
            "sglang_reshard.sources.named_shards(model) yields, or call reshard() on its FSDPModule first"
        )


def _parameters(state: Any) -> Iterator[Any]:
    """Yields the FSDPParam objects of one FSDPState."""
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    for group in groups:
        if group is not None:
            yield from group.fsdp_params


def _address(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's storage; 0 if it has none."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) not in (torch.Tensor, nn.Parameter) or local.layout is not torch.strided:
        return 0
    return local.untyped_storage().data_ptr() if local.device.type != "meta" else 0
