"""Makes derived tensors again where they are, for engines whose CUDA graphs hold the addresses.

The method that makes one runs by itself: with the attribute reset to its value before the first forward pass, and with
arguments that end the method as soon as it uses them. That such a run makes the tensor, and of nothing but the live
weights, is shown before the first update: it has to leave the same bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import torch

from sglang_reshard.derived.laziness import is_made_of_values, makers, owners
from sglang_reshard.derived.loaded_state import Change
from sglang_reshard.torch_private import TorchDispatchMode
from sglang_reshard.trace.lazy_tensor import tensors_in
from sglang_reshard.trace.live import same_bits, storage_key
from sglang_reshard.trace.recorder import written_tensors


class Remake(NamedTuple):
    """A derived tensor, and the method that makes it, of its owner or of the module that has the owner."""

    of: Change
    guards: tuple[Change, ...]
    tensor: torch.Tensor
    maker: Any

    def run(self) -> None:
        """Computes the tensor from the live weights, in its memory. Raises RuntimeError if it has another form now."""
        made, _ = _made((self.of, *self.guards), self.maker, ())
        if made is not self.tensor:
            if not isinstance(made, torch.Tensor) or _form(made) != _form(self.tensor):
                raise RuntimeError(
                    f"{self.maker.__name__} no longer computes {self.of.path} with the same shape and dtype; start the "
                    "engine with disable_cuda_graph=True"
                )
            self.tensor.copy_(made)
            self.of.table.put(self.of.key, self.tensor)


def rehearse(derived: Change, guards: Sequence[Change], weights: Collection[int]) -> Remake | str:
    """Tries the methods that may make `derived`, and leaves everything as it was. A number is never made in place.

    guards   what is restored with it
    weights  storages of all parameters and buffers, by `storage_key`

    Returns what makes the tensor again, or why nothing does: empty if no weight is in it.
    """
    tensor = derived.value
    if not isinstance(tensor, (torch.Tensor, float)) or derived.table.kind != "attributes":
        return "it is not an attribute that a method of the model computes"
    values = [guard.value for guard in guards]
    refusal = "no method computes it without the inputs of a forward pass"
    for maker in [getattr(owner, n) for owner in owners(derived.table) for n in makers(owner, derived.key) if n]:
        try:
            made, of_weights = _made((derived, *guards), maker, weights)
        except Exception as error:
            refusal = f"{maker.__name__} fails with {type(error).__name__}: {error}"
            continue
        finally:
            derived.table.put(derived.key, tensor)
            for guard, value in zip(guards, values, strict=True):
                guard.table.put(guard.key, value)
        if made is None or made is derived.before:
            continue
        if not of_weights and not is_made_of_values(derived):
            return ""
        if isinstance(made, float) or isinstance(tensor, float):
            return f"{maker.__name__} computes a number, which CUDA graphs have captured"
        if _form(made) == _form(tensor) and same_bits(made, tensor):
            return Remake(derived, tuple(guards), tensor, maker)
        refusal = f"{maker.__name__} computes another tensor from the same weights"
    return refusal


def _made(changes: Sequence[Change], method: Any, weights: Collection[int]) -> tuple[torch.Tensor | float | None, bool]:
    """Runs `method` without the first of these. Returns what it has made, and whether weights are in it."""
    for change in changes:
        change.restore()
    method = getattr(method, "_torchdynamo_orig_callable", method)
    mode = _Watch(weights)
    required = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    inputs = [_Input() for p in parameters if p.kind in required and p.default is p.empty]
    with torch.no_grad(), mode, suppress(_InputUsed):
        try:
            method(*inputs)
        except TypeError as error:  # of an operator of torch's that was given one
            if _Input.__name__ not in str(error):
                raise
    made = changes[0].value
    if isinstance(made, float):
        return made, mode.read
    if not isinstance(made, torch.Tensor):
        return None, False
    return made, mode.read or storage_key(made) in mode.derived


class _InputUsed(BaseException):
    """No Exception, so that the method does not handle it."""


class _Input:
    """Stands for an argument of a forward pass. Any use of it ends the method."""

    def _end(self, *_: Any) -> NoReturn:
        raise _InputUsed

    __getattribute__ = __getitem__ = __bool__ = __iter__ = __len__ = _end


class _Watch(TorchDispatchMode):
    """Notes which storages depend on weights. Raises RuntimeError for a write to a weight.

    read  a number was read from a tensor that depends on weights
    """

    def __init__(self, weights: Collection[int]) -> None:
        super().__init__()
        self._weights = weights
        self.derived: set[int] = set()
        self.read = False
        self._kept: list[torch.Tensor] = []  # so that no other tensor gets the address

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(storage_key(tensor) in self._weights for tensor in written_tensors(func, args, kwargs)):
            raise RuntimeError(f"{func} writes to a weight")
        keys = map(storage_key, tensors_in(args, kwargs))
        of_weights = any(key in self._weights or key in self.derived for key in keys)
        out = func(*args, **kwargs)
        if of_weights:
            for tensor in out if isinstance(out, (list, tuple)) else (out,):
                self.read |= isinstance(tensor, (int, float))
                if isinstance(tensor, torch.Tensor):
                    self.derived.add(storage_key(tensor))
                    self._kept.append(tensor)
        return out


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
