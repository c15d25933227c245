"""Makes derived tensors again where they are, for engines whose CUDA graphs hold the addresses.

The method that makes one runs by itself: with the attribute reset to its value before the first forward pass, and with
arguments that end the method as soon as it uses them. That such a run makes the tensor, and of nothing but the live
weights, is shown before the first update: it has to leave the same bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from sglang_reshard.derived.laziness import makers
from sglang_reshard.derived.loaded_state import Appeared
from sglang_reshard.torch_private import TorchDispatchMode
from sglang_reshard.trace import aten_ops
from sglang_reshard.trace.lazy_tensor import tensors_in
from sglang_reshard.trace.live import storage_key


class Remake(NamedTuple):
    """A derived tensor, and the method of its owner that makes it."""

    of: Appeared
    tensor: torch.Tensor
    maker: str

    def run(self) -> None:
        """Computes the tensor from the live weights, in its memory. Raises RuntimeError if it has another form now."""
        made, _ = _made(self.of, self.maker, ())
        if made is not self.tensor:
            if made is None or _form(made) != _form(self.tensor):
                raise RuntimeError(
                    f"{self.maker} no longer computes {self.of.path} with the same shape and dtype; start the engine "
                    "with disable_cuda_graph=True"
                )
            self.tensor.copy_(made)
            self.of.table.put(self.of.key, self.tensor)


class Rehearsed(NamedTuple):
    """The outcome of a rehearsal: what makes the tensor again, or why nothing does; neither if no weight is in it."""

    remake: Remake | None = None
    refusal: str = ""


def rehearse(derived: Appeared, weights: Collection[int]) -> Rehearsed:
    """Tries the methods that may make `derived`, and leaves everything as it was.

    weights  storages of all parameters and buffers, by `storage_key`
    """
    tensor = derived.table.get(derived.key)
    if not isinstance(tensor, torch.Tensor) or derived.table.kind != "attributes":
        return Rehearsed(refusal="it is not an attribute that a method of the model computes")
    refusal = "no method computes it without the inputs of a forward pass"
    for maker in makers(derived.table.owner, derived.key):
        if not maker:
            continue
        try:
            made, of_weights = _made(derived, maker, weights)
        except Exception as error:
            refusal = f"{maker} fails with {type(error).__name__}: {error}"
            continue
        finally:
            derived.table.put(derived.key, tensor)
        if made is None:
            continue
        if not of_weights:
            return Rehearsed()
        if _form(made) == _form(tensor) and _equal(made, tensor):
            return Rehearsed(Remake(derived, tensor, maker))
        refusal = f"{maker} computes another tensor from the same weights"
    return Rehearsed(refusal=refusal)


def _made(derived: Appeared, maker: str, weights: Collection[int]) -> tuple[torch.Tensor | None, bool]:
    """Runs `maker` without the tensor. Returns what it has made, and whether weights are in it."""
    derived.restore()
    method = getattr(derived.table.owner, maker)
    method = getattr(method, "_torchdynamo_orig_callable", method)
    mode = _Watch(weights)
    with torch.no_grad(), mode, _ended_by_inputs():
        method(*_inputs(method))
    made = derived.table.get(derived.key)
    if not isinstance(made, torch.Tensor):
        return None, False
    return made, storage_key(made) in mode.derived


class _InputUsed(BaseException):
    """No Exception, so that the method does not handle it."""


class _Input:
    """Stands for an argument of a forward pass. Any use of it ends the method."""

    def __getattribute__(self, name: str) -> Any:
        raise _InputUsed(name)

    def __getitem__(self, _key: Any) -> Any:
        raise _InputUsed

    def __bool__(self) -> bool:
        raise _InputUsed

    def __iter__(self) -> Iterator[Any]:
        raise _InputUsed

    def __len__(self) -> int:
        raise _InputUsed


def _inputs(method: Any) -> list[_Input]:
    required = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return [_Input() for p in parameters if p.kind in required and p.default is p.empty]


@contextmanager
def _ended_by_inputs() -> Iterator[None]:
    try:
        yield
    except _InputUsed:
        pass
    except TypeError as error:  # of an operator of torch's that was given one
        if _Input.__name__ not in str(error):
            raise


class _Watch(TorchDispatchMode):
    """Notes which storages depend on weights. Raises RuntimeError for a write to a weight."""

    def __init__(self, weights: Collection[int]) -> None:
        super().__init__()
        self._weights = weights
        self.derived: set[int] = set()
        self._kept: list[torch.Tensor] = []  # so that no other tensor gets the address

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for written in aten_ops.written_arguments(func, args, kwargs):
            for tensor in written if isinstance(written, (list, tuple)) else (written,):
                if isinstance(tensor, torch.Tensor) and storage_key(tensor) in self._weights:
                    raise RuntimeError(f"{func} writes to a weight")
        of_weights = any(self._depends(tensor) for tensor in tensors_in(args, kwargs))
        out = func(*args, **kwargs)
        if of_weights:
            for tensor in out if isinstance(out, (list, tuple)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.derived.add(storage_key(tensor))
                    self._kept.append(tensor)
        return out

    def _depends(self, tensor: torch.Tensor) -> bool:
        key = storage_key(tensor)
        return key in self._weights or key in self.derived


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))
