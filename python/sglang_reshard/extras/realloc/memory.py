"""Checks the memory of a plan: that a move overwrites nothing that is still to be read, and that nothing has moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from sglang_reshard.errors import Mismatch, ReshardError, Unsupported
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.memory.overlap import Written, overwritten
from sglang_reshard.plan import TensorIndex

Named = tuple[str, torch.Tensor]


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two views of the same shape are the same elements in the same order."""
    alike = a.device == b.device and a.dtype == b.dtype and a.shape == b.shape and a.data_ptr() == b.data_ptr()
    return alike and all(n < 2 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True))


def held_regions(index: TensorIndex, shards: Sequence[torch.Tensor], rank: int) -> Iterator[Named]:
    """Yields the elements that this rank holds of each tensor, a view per box.

    shards  this rank's local tensors, in the layout's order
    """
    for number, tensor in enumerate(index.layout.tensors):
        for _, region in index.tensor_class(number).shard_map.held_by(rank):
            yield tensor.name, region.view(shards[number])


def check_not_overwritten(sources: Iterable[Named], written: Iterable[torch.Tensor], rank: int) -> None:
    """Raises Mismatch for a source tensor that the move would overwrite while it reads it.

    sources  the elements that this rank holds; `written` those that it writes
    """
    held = (Written.of(name, view) for name, view in sources if view.numel())
    if name := overwritten(held, (Written.of("", view) for view in written if view.numel())):
        raise Mismatch(
            f"trainer rank {rank}: the source's {name} shares memory with the target, but holds other elements there; "
            "give the target separate memory"
        )


class UsedMemory:
    """The storages of source and target, and the addresses for which a plan was made.

    The target's memory, where the source uses it too, is the target's.
    """

    def __init__(self, sources: Iterable[Named], targets: Iterable[Named], rank: int) -> None:
        self._rank = rank
        self._targets = _storages(targets)
        self._sources = {key: found for key, found in _storages(sources).items() if key not in self._targets}
        # Compared in every run: one list of all addresses, and no other Python for each tensor.
        self._all = [storage for _, storage in (*self._sources.values(), *self._targets.values())]
        self._addresses = [storage.data_ptr() for storage in self._all]

    def problem(self, *, drop: bool) -> ReshardError | None:
        """Returns why the plan cannot be run, or the source be dropped afterwards; None if it can."""
        now = [storage.data_ptr() for storage in self._all]
        if now != self._addresses:
            names = [name for name, _ in (*self._sources.values(), *self._targets.values())]
            name = next(n for n, a, b in zip(names, now, self._addresses, strict=True) if a != b)
            return Mismatch(
                f"trainer rank {self._rank}: the memory of {name} was freed or has moved since the plan was made; make "
                "a new plan"
            )
        for name, storage in self._sources.values() if drop else ():
            if not storage.resizable():
                return Unsupported(
                    f"trainer rank {self._rank}: torch did not allocate the memory of {name} (it comes from numpy or "
                    "is mapped), so it cannot be freed; leave out drop_source"
                )
        return None

    def drop_source(self) -> None:
        """Frees the source's storages, but for those that the target uses.

        On GPUs it waits for the move: a block goes back to the stream that it was allocated on, which need not be the
        one that has waited for the messages.
        """
        runtime().synchronize(storage.device for _, storage in self._sources.values())
        for _, storage in self._sources.values():
            storage.resize_(0)


def _storages(tensors: Iterable[Named]) -> dict[tuple[torch.device, int], tuple[str, torch.UntypedStorage]]:
    found: dict[tuple[torch.device, int], tuple[str, torch.UntypedStorage]] = {}
    for name, tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault((storage.device, storage.data_ptr()), (name, storage))
    return found
