"""Whether a trainer gives the same memory again, described alike: then nothing about it need be read anew.

Asked at the start of every update, of every tensor: so it works on whole columns (all names, all addresses),
which `map` walks without Python code for each tensor.

A tensor's object does not count, only what it stands for: `state_dict()` makes new ones every time. Nor
may it be referred to, even weakly: torch refuses to move a module of DTensors, as to offload it, while
anything does.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_reshard.sources.tensor_fingerprint import TensorFingerprint

Given = Sequence[tuple[Any, ...]]  # as `describe` takes them, in a list

_name, _tensor, _third = map(operator.itemgetter, range(3))
_local, _spec = operator.attrgetter("_local_tensor"), operator.attrgetter("_spec")
_storage, _id = torch.Tensor.untyped_storage, operator.attrgetter("_cdata")
_expired = torch.UntypedStorage._expired
_KINDS = {torch.Tensor, torch.nn.Parameter}  # of local tensors: others have no memory of their own


class ChangeDetector:
    """The tensors of one update: names, how they are distributed, place in memory. Keeps no memory alive."""

    def __init__(self, given: Given) -> None:
        tensors = list(map(_tensor, given))
        self._names = list(map(_name, given))
        self._lengths = list(map(len, given))
        self._distributed = [isinstance(tensor, DTensor) for tensor in tensors]
        self._plain = list(map(operator.not_, self._distributed))
        self._described = [length > 2 for length in self._lengths]
        self._specs = self._specs_of(given, tensors)
        locals_ = self._locals_of(tensors)
        self._places = TensorFingerprint(locals_)
        self._storage_ids = list(map(_id, map(_storage, locals_)))
        self._storages = {_id(storage): StorageWeakRef(storage) for storage in map(_storage, locals_)}

    @classmethod
    def of(cls, given: Given, read: Sequence[torch.Tensor]) -> ChangeDetector | None:
        """None unless what was read (`TrainerState.locals`) is the memory of these very tensors.

        It may be that of others that they stand for.
        """
        locals_ = [t._local_tensor if isinstance(t, DTensor) else t for t in map(_tensor, given)]
        theirs = _KINDS.issuperset(map(type, locals_)) and all(
            local.data_ptr() == found.data_ptr() for local, found in zip(locals_, read, strict=True)
        )
        return cls(given) if theirs else None

    def same(self, given: Given) -> bool:
        """Whether to describe what is given would tell nothing new, its values aside."""
        if list(map(len, given)) != self._lengths or list(map(_name, given)) != self._names:
            return False
        tensors = list(map(_tensor, given))
        try:
            return all(map(operator.is_, self._specs_of(given, tensors), self._specs)) and self._there(
                self._locals_of(tensors)
            )
        except (AttributeError, RuntimeError):  # no DTensor any more; or no storage
            return False

    def _there(self, locals_: Sequence[Any]) -> bool:
        """Whether these local tensors are views of the same storages, at the same places."""
        return (
            # An address is given again once a storage is freed or resized, and so is an id.
            list(map(_id, map(_storage, locals_))) == self._storage_ids
            and not any(map(_expired, self._storages))
            and _KINDS.issuperset(map(type, locals_))
            and self._places.same(locals_)
        )

    def _locals_of(self, tensors: Sequence[Any]) -> list[Any]:
        """The local tensors, those of DTensors first."""
        return [*map(_local, compress(tensors, self._distributed)), *compress(tensors, self._plain)]

    def _specs_of(self, given: Given, tensors: Sequence[Any]) -> list[Any]:
        """What says how the tensors are distributed: objects that are replaced, not changed."""
        return [*map(_spec, compress(tensors, self._distributed)), *map(_third, compress(given, self._described))]
