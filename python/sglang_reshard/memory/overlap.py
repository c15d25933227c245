"""Finds memory that would be written under two names, or twice by one tensor, as torch's `copy_` refuses to.

Runs once per plan. Only views whose address ranges overlap are compared element by element, with a byte of host memory
for each byte of their range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from sglang_reshard.errors import Mismatch


class Written(NamedTuple):
    """Elements that are written under a name.

    address  of the first one, in bytes
    strides  in elements
    """

    name: str
    device: torch.device
    address: int
    item_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Written:
        return cls.within(name, tensor, 0, tuple(tensor.shape), tensor.stride())

    @classmethod
    def within(
        cls, name: str, tensor: torch.Tensor, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Written:
        """Elements of a tensor's storage that begin `offset` elements after the tensor's first."""
        size = tensor.element_size()
        kept = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
        address = tensor.data_ptr() + offset * size
        return cls(name, tensor.device, address, size, tuple(n for n, _ in kept), tuple(s for _, s in kept))

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.address + (1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))) * (
            self.item_bytes
        )


def written_once(
    written: Sequence[Written], tied: Callable[[str, str], bool], where: str, side: str = "the target"
) -> list[int]:
    """Returns which of these to write, by number: of the same elements under tied names, the first alone.

    tied   returns whether two names are written with the same values
    where  begins error messages, "trainer rank 1: "
    side   what they call that which is written to

    Raises Mismatch, naming the tensors, for a tensor whose own elements share memory, as those of an expanded one do,
    and for two that share memory and are not tied, or share only a part.
    """
    first: dict[object, int] = {}
    for number, one in enumerate(written):
        if 0 in one.shape:
            continue
        earlier = written[first.setdefault(one[1:], number)]
        if earlier is not one and not tied(earlier.name, one.name):
            raise _overlap(where, earlier.name, one.name, side)
    numbers = set(first.values())
    for cluster in _clusters([written[number] for number in numbers]):
        _check(cluster, where, side)
    return [number for number, one in enumerate(written) if number in numbers or 0 in one.shape]


def overwritten(held: Iterable[Written], written: Iterable[Written]) -> str:
    """Returns the name of one of `held` that shares memory with one of `written`; empty if none does."""
    for cluster in _clusters([*held, *(one._replace(name="") for one in written)]):
        writes, reads = ([one for one in cluster if bool(one.name) == named] for named in (False, True))
        if not writes or not reads:
            continue
        begin, end = min(one.address for one in cluster), max(one.end for one in cluster)
        marked = torch.zeros(end - begin, dtype=torch.bool)
        for one in writes:
            _bytes(marked, one, begin).fill_(True)
        if found := next((one.name for one in reads if _bytes(marked, one, begin).any()), ""):
            return found
    return ""


def _clusters(written: Iterable[Written]) -> Iterator[list[Written]]:
    """Yields those that may share memory: address ranges that overlap, and tensors that may overlap themselves."""
    cluster: list[Written] = []
    end = 0
    for one in sorted(written, key=lambda w: (str(w.device), w.address)):
        if cluster and (one.device != cluster[0].device or one.address >= end):
            if len(cluster) > 1 or _may_overlap_itself(cluster[0]):
                yield cluster
            cluster = []
        end = max(end, one.end) if cluster else one.end
        cluster.append(one)
    if len(cluster) > 1 or (cluster and _may_overlap_itself(cluster[0])):
        yield cluster


def _may_overlap_itself(one: Written) -> bool:
    """Returns False where each dimension steps over all of the smaller ones."""
    reach = 1
    for stride, size in sorted(zip(one.strides, one.shape, strict=True)):
        if stride < reach:
            return True
        reach += (size - 1) * stride
    return False


def _check(cluster: Sequence[Written], where: str, side: str) -> None:
    """Raises Mismatch if two elements of these share a byte."""
    begin, end = min(one.address for one in cluster), max(one.end for one in cluster)
    marked = torch.zeros(end - begin, dtype=torch.bool)
    for number, one in enumerate(cluster):
        if _may_overlap_itself(one):
            alone = torch.zeros(end - begin, dtype=torch.bool)
            own = _bytes(alone, one, begin)
            own.fill_(True)
            if int(alone.sum()) < own.numel():
                raise Mismatch(
                    f"{where}{one.name} of {side} has elements that share memory (shape {one.shape}, strides "
                    f"{one.strides}; was it expanded?) and cannot be written to. clone() it first"
                )
        own = _bytes(marked, one, begin)
        if own.any():
            raise _overlap(where, overwritten(cluster[:number], [one]), one.name, side)
        own.fill_(True)


def _bytes(marked: torch.Tensor, one: Written, begin: int) -> torch.Tensor:
    """Returns the bytes of the elements, in a tensor with an element for each byte from address `begin` on."""
    strides = (*(s * one.item_bytes for s in one.strides), 1)
    return marked.as_strided((*one.shape, one.item_bytes), strides, one.address - begin)


def _overlap(where: str, a: str, b: str, side: str) -> Mismatch:
    if a == b:
        return Mismatch(f"{where}two shards of {a} of {side} share memory; give each its own memory")
    return Mismatch(
        f"{where}{a} and {b} of {side} share memory, and one would overwrite the other. Give each its own memory. "
        "Names that share a whole tensor are allowed only if they share it in the source, too"
    )
