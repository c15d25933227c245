"""Keeps the values of a model's constructor for its tensors, if an engine starts on random ("dummy") weights.

SGLang's dummy start randomises every floating-point tensor of the model's state dict. Most are weights, which an update
writes. Three kinds are not:

    persistent buffers        tables and constants. Those that no checkpoint has are right as they were constructed,
                              and nothing would ever repair them
    scales of the KV cache    1, or "not set", unless a checkpoint has them
    parameters that a load    a bias that is added for a fused layer, the indexer of a layer that uses another layer's.
    of the checkpoint skips   Only the first update shows which these are

The first two are never randomised (`keep_initial_values`). Of parameters the initial value is remembered, and given
back by the first update that leaves the parameter alone (`restore`):

    up to 65,536 elements     a copy in host memory
    larger, all equal         the element: zeros of biases of experts, for example
    larger, of a layer        nothing. Such layers allocate uninitialised memory for the loader, so that engines
    that SGLang quantizes     started on the checkpoint differ there from each other too; any value will do
    larger, of others         nothing. It may be a table that the constructor computes: the update is refused
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sglang_reshard.torch_private import persistent_buffers
from sglang_reshard.trace.kv_scales import is_scale

_KEPT = "_reshard_initial_values"  # the attribute of a model that has them
# By a parameter's name: all elements, or one that all are equal to, in host memory; None if they are not remembered.
InitialValues = Mapping[str, torch.Tensor | None]
_COPIED_ELEMENTS = 1 << 16
_SAMPLE = 1 << 10  # elements that must be equal before all are compared
_CHUNK = 1 << 24
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """Not a dictionary: tensors in a module's dictionaries are live tensors, see `trace.live`."""

    values: InitialValues


def kept_values(model: torch.nn.Module) -> InitialValues | None:
    """Returns what `keep_initial_values` has kept of this model; None if it was not called."""
    kept: _Kept | None = vars(model).get(_KEPT)
    return None if kept is None else kept.values


@contextmanager
def keep_initial_values(model: torch.nn.Module) -> Iterator[None]:
    """Must be held around the code that randomises a model whose tensors are as its constructor has made them."""
    with torch.no_grad():
        fixed = [tensor for _, tensor in persistent_buffers(model) if tensor.is_floating_point()]
        fixed += [parameter.data for name, parameter in model.named_parameters() if is_scale(name, parameter)]
        copies = [tensor.clone() for tensor in fixed]
        values = {name: _initial(parameter.data) for name, parameter in model.named_parameters()}
    yield
    with torch.no_grad():
        for tensor, copy in zip(fixed, copies, strict=True):
            tensor.copy_(copy)
    vars(model)[_KEPT] = _Kept(values)


def _initial(tensor: torch.Tensor) -> torch.Tensor | None:
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    if type(tensor) is not torch.Tensor or tensor.numel() == 0:  # a subclass may keep its elements elsewhere
        return None
    if tensor.numel() <= _COPIED_ELEMENTS:
        return tensor.to("cpu", copy=True)
    dense = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if not dense.is_contiguous():
        return None
    bits = dense.view(-1).view(_BITS[tensor.dtype.itemsize])
    for part in (bits[:: len(bits) // _SAMPLE], *bits.split(_CHUNK)):
        if not bool((part == bits[0]).all()):
            return None
    return dense.view(-1)[0].to("cpu", copy=True)
