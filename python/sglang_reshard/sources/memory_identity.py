"""Detects whether a trainer passes the same memory again, sharded as before, so that nothing has to be read again.

Runs over every tensor at the start of every update. It therefore compares whole columns (all names, all addresses)
in few calls, without Python code per tensor. Tensor objects do not count, as `state_dict()` creates new ones every
time, and none is referred to, not even weakly: torch refuses to move a module of DTensors, as offloading does, while
anything refers to them. Storages are referred to weakly, so that their end is reported and need not be looked for.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain, compress
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sglang_reshard.torch_private import DTensorSpec

NamedTensorList = Sequence[tuple[Any, ...]]  # (name, tensor) or (name, tensor, sharding), as `describe` takes them

_name, _tensor, _sharding = map(operator.itemgetter, range(3))
_local, _spec = operator.attrgetter("_local_tensor"), operator.attrgetter("_spec")
# A spec is an object that can be changed, and what it states of the sharding are objects that cannot.
_stated = [
    operator.attrgetter(name) for name in ("placements", "shard_order") if name in DTensorSpec.__dataclass_fields__
]
_piece, _group = operator.attrgetter("ds_tensor"), operator.attrgetter("ds_process_group")  # of ZeRO-3's parameters
# Compares the addresses of many tensors in one call; private to torch, and not in builds of it without CUDA.
_equal_addresses = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
_alive: Any = weakref.ref.__call__
_nbytes = torch.UntypedStorage.nbytes
_is_contiguous = torch.Tensor.is_contiguous
_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}  # other local tensors have no memory of their own
_FINGERPRINT = (
    torch.Tensor.data_ptr,
    operator.attrgetter("shape"),
    torch.Tensor.stride,
    operator.attrgetter("dtype"),
    torch.Tensor.is_neg,  # a negated view has the same address and other values
)


class MemoryFingerprint:
    """Address, shape, strides and dtype of strided tensors at one time. Keeps none of them alive."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, of_dtensors: bool = False) -> None:
        """`of_dtensors`: they are local tensors, whose shapes and dtypes are as long the same as their DTensors' specs.

        Then it is enough that contiguous ones stay so, which takes half the time.
        """
        self._contiguous = of_dtensors and all(map(_is_contiguous, tensors))
        self._count = len(tensors)
        self._columns = []
        # A subclass's own __torch_function__ would be Python code per tensor.
        with torch._C.DisableTorchFunctionSubclass():
            for read in _FINGERPRINT:
                interned: dict[object, object] = {}  # many tensors share few shapes: fewer objects to collect
                values = list(map(read, tensors))
                self._columns.append((read, list(map(interned.setdefault, values, values))))
        self._addresses, self._indices = self._columns[0][1], list(range(len(tensors)))
        self._guards = _tensor_guards(tensors)

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Returns whether these tensors are the same views of the same memory, in the same order."""
        if len(tensors) != self._count:
            return False
        try:
            with torch._C.DisableTorchFunctionSubclass():
                if self._contiguous:
                    return all(map(_is_contiguous, tensors)) and self._same_addresses(tensors)
                if self._guards is not None and self._guards.check(*tensors):
                    return self._same_addresses(tensors)
                # Compared lazily: new lists of shapes would trigger the garbage collector.
                return all(all(map(operator.eq, map(read, tensors), column)) for read, column in self._columns)
        except RuntimeError:  # one of them is no longer strided and has no address
            return False

    def _same_addresses(self, tensors: Sequence[torch.Tensor]) -> bool:
        if _equal_addresses is not None:
            return bool(_equal_addresses(tensors, self._addresses, self._indices))
        return all(map(operator.eq, map(torch.Tensor.data_ptr, tensors), self._addresses))


def _tensor_guards(tensors: Sequence[torch.Tensor]) -> Any:
    """Returns torch.compile's check of everything but addresses, in one pass; None if this torch does not have it.

    It also rejects changes that do not matter here (requires_grad, grad mode); the columns then decide.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        guards: Any = TensorGuards  # its stub has other argument types than it accepts
        return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except Exception:  # private to torch, and only an optimization
        return None


class MemoryIdentity:
    """Names, shardings and memory of the tensors of one update. Keeps no memory alive.

    A storage that lives has its memory to itself, and one in shared memory cannot be moved: a tensor at a known address
    in it is on that storage. A storage that was freed leaves its address to others.
    """

    def __init__(self, named_tensors: NamedTensorList, *, kept_alive: bool = False, kept: Sequence[bool] = ()) -> None:
        """Reads their addresses.

        kept_alive  somebody keeps this memory, so that no other has its addresses
        kept        whether each of them counts; empty if all do
        """
        self._names, self._kept = list(map(_name, named_tensors)), kept
        named_tensors = list(compress(named_tensors, kept)) if kept else named_tensors
        tensors = list(map(_tensor, named_tensors))
        self._has_sharding = _selectors(len(entry) > 2 for entry in named_tensors)
        self._items = sum(map(len, named_tensors))
        self._is_dtensor = _selectors(isinstance(tensor, DTensor) for tensor in tensors)
        self._is_partitioned = _selectors(map(is_partitioned, tensors))
        self._is_plain = _selectors(
            not isinstance(tensor, DTensor) and not is_partitioned(tensor) for tensor in tensors
        )
        self._shardings = self._shardings_of(named_tensors, tensors)
        local_tensors = self._local_tensors_of(tensors)
        self._dtensors = sum(self._is_dtensor)
        self._of_dtensors = MemoryFingerprint(local_tensors[: self._dtensors], of_dtensors=True)
        self._of_others = MemoryFingerprint(local_tensors[self._dtensors :])
        self._freed: list[object] = []
        storages = [] if kept_alive else [tensor.untyped_storage() for tensor in local_tensors]
        distinct = {storage._cdata: storage for storage in storages}.values()
        self._storages = [weakref.ref(storage, self._freed.append) for storage in distinct]
        # Those in shared host memory can only be emptied, and have no address then.
        resizable = [s for s in distinct if s.device.type != "cpu" or not s.is_shared()]
        self._resizable, self._sizes = list(map(weakref.ref, resizable)), list(map(_nbytes, resizable))

    @classmethod
    def of(
        cls, named_tensors: NamedTensorList, read: Sequence[torch.Tensor | None], *, kept_alive: bool = False
    ) -> MemoryIdentity | None:
        """Returns a detector; None if the memory `read` for them (`TrainerState.inputs`) is not these tensors' own.

        Tensors that were not read, None there, do not count.

        It is not if FSDP2's unsharded copies stand for sharded parameters, for example.
        """
        kept = [found is not None for found in read]
        local_tensors = list(map(own_memory, map(_tensor, compress(named_tensors, kept))))
        own = _PLAIN_TYPES.issuperset(map(type, local_tensors)) and all(
            local.data_ptr() == found.data_ptr()
            for local, found in zip(local_tensors, [r for r in read if r is not None], strict=True)
        )
        return cls(named_tensors, kept_alive=kept_alive, kept=() if all(kept) else kept) if own else None

    def unchanged(self, named_tensors: NamedTensorList) -> bool:
        """Returns whether `describe` would return the same for these tensors, with the same memory."""
        if self._freed or list(map(_name, named_tensors)) != self._names:
            return False
        if self._kept:
            named_tensors = list(compress(named_tensors, self._kept))
        if sum(map(len, named_tensors)) != self._items:
            return False
        tensors = list(map(_tensor, named_tensors))
        try:
            # Lists compare the same objects first by identity, without a call for each.
            if self._shardings_of(named_tensors, tensors) != self._shardings:
                return False
            local_tensors = self._local_tensors_of(tensors)
            return (
                list(map(_nbytes, map(_alive, self._resizable))) == self._sizes
                and _PLAIN_TYPES.issuperset(map(type, local_tensors))
                and self._of_dtensors.matches(local_tensors[: self._dtensors])
                and self._of_others.matches(local_tensors[self._dtensors :])
            )
        except (AttributeError, IndexError, RuntimeError, TypeError):
            return False  # one of them is no longer a DTensor, has no sharding any more, or no storage

    def _local_tensors_of(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the local tensors, those of DTensors first, and then those of ZeRO-3's parameters."""
        return [
            *map(_local, compress(tensors, self._is_dtensor)),
            *map(_piece, compress(tensors, self._is_partitioned)),
            *compress(tensors, self._is_plain),
        ]

    def _shardings_of(self, named_tensors: NamedTensorList, tensors: Sequence[Any]) -> list[Any]:
        """Returns the objects that describe shardings, and the parts of specs: these are replaced, never changed."""
        specs = list(map(_spec, compress(tensors, self._is_dtensor)))
        return [
            *specs,
            *chain.from_iterable(map(read, specs) for read in _stated),
            *map(_group, compress(tensors, self._is_partitioned)),
            *map(_sharding, compress(named_tensors, self._has_sharding)),
        ]


def _selectors(chosen: Iterable[bool]) -> list[bool]:
    """Returns selectors for `compress`, which looks at no tensor if there are none."""
    found = list(chosen)
    return found if any(found) else []


def is_partitioned(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a parameter that DeepSpeed's ZeRO-3 has partitioned: `ds_tensor` is the piece."""
    return hasattr(tensor, "ds_tensor")


def is_flattened(parameter: torch.Tensor) -> bool:
    """Returns whether FSDP1 registered this for a flat parameter: the flat one, or a view of this rank's piece."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def own_memory(tensor: Any) -> Any:
    """Returns the tensor that has the memory of a passed value."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor.ds_tensor if is_partitioned(tensor) else tensor
