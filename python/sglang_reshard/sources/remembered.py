"""Whether a trainer gives the same tensors again, at the same addresses: then nothing about them need be read anew."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Given = Sequence[tuple[Any, ...]]  # as `describe` takes them, in a list


class Remembered:
    """The tensors of one update, by identity and place in memory. Keeps none of them alive."""

    def __init__(self, given: Given) -> None:
        self._names = [name for name, *_ in given]
        self._tensors = [weakref.ref(tensor) for _, tensor, *_ in given]
        self._places = [_place(tensor) for _, tensor, *_ in given]
        self._specs = [_spec(tensor, rest) for _, tensor, *rest in given]

    @classmethod
    def of(cls, given: Given, shards: Sequence[torch.Tensor]) -> Remembered | None:
        """None unless the shards are the memory of these very tensors, and not of others that they stand for."""
        found = cls(given)
        theirs = all(
            place is not None and place[0] == shard.data_ptr()
            for place, shard in zip(found._places, shards, strict=True)
        )
        return found if theirs else None

    def same(self, given: Given) -> bool:
        if len(given) != len(self._names):
            return False
        for (name, tensor, *rest), known_name, reference, place, spec in zip(
            given, self._names, self._tensors, self._places, self._specs, strict=True
        ):
            if reference() is not tensor or name != known_name:
                return False
            if _spec(tensor, rest) is not spec or _place(tensor) != place:
                return False
        return True


def _place(tensor: Any) -> tuple[Any, ...] | None:
    """Where a tensor's local part is, and how it lies there; None for a kind that has no memory of its own."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        return None
    return local.data_ptr(), local.shape, local.stride(), local.dtype


def _spec(tensor: Any, rest: Sequence[Any]) -> Any:
    """What says how a tensor is distributed: an object that is replaced, not changed."""
    if rest:
        return rest[0]
    return tensor._spec if isinstance(tensor, DTensor) else None
