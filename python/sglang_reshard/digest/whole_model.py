"""One number for all the weights of a model, the same however trainer and engine cut it.

The digests of all that engine ranks keep, each element counted once, each tensor's multiplied by an odd number that
its name gives; modulo 2^64. Neither the engine's size nor the trainer's layout nor the order of the tensors enters
into it. What does: names, shapes, and the bits of the elements in the dtype that the engine keeps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import numpy as np

from sglang_reshard.digest.coefficients import MODULUS
from sglang_reshard.layout.regions import Region
from sglang_reshard.plan import TensorIndex

_BYTES = 8


def weights_of_regions(
    catalog: TensorIndex, tensors: np.ndarray, ways: np.ndarray, kept: Sequence[tuple[str, Region]]
) -> np.ndarray | None:
    """uint64, by what the digest of each region counts; None where regions are not each element exactly once.

    tensors, ways  of each region: the number of the tensor, and of the way in `kept` (dtype, region); no two alike

    Regions of one tensor overlap, and are not counted, where engine ranks share more than whole shards: scales of
    blocks that a cut goes through, for example.
    """
    dtypes = sorted({dtype for dtype, _ in kept})
    dtype_of = np.array([dtypes.index(dtype) for dtype, _ in kept], np.int64)
    elements_of = np.zeros(len(kept), np.int64)
    for way in np.unique(ways).tolist():  # nobody has checked the others
        elements_of[way] = kept[way][1].numel
    places = tensors.astype(np.int64) * len(dtypes) + dtype_of[ways]
    counted = np.zeros(len(catalog.kind_of) * len(dtypes), np.int64)
    np.add.at(counted, places, elements_of[ways])
    there = np.unique(places)
    whole = np.array([math.prod(kind.shape) for kind in catalog.kinds], np.int64)[catalog.kind_of]
    if not np.array_equal(counted[there], whole[there // max(1, len(dtypes))]):
        return None
    of_tensor = np.zeros(len(catalog.kind_of), np.uint64)
    for number in np.unique(tensors).tolist():
        of_tensor[number] = _of_name(catalog.layout.tensors[number].name)
    return of_tensor[tensors]


def packed(part: int | None) -> bytes:
    """A trainer rank's part, to be sent; empty for none."""
    return b"" if part is None else part.to_bytes(_BYTES, "little")


def digest_of(parts: Iterable[bytes]) -> str:
    """Of all trainer ranks' parts: 16 hexadecimal digits; empty where one of them has none."""
    total = 0
    for part in parts:
        if len(part) != _BYTES:
            return ""
        total += int.from_bytes(part, "little")
    return f"{total % MODULUS:0{2 * _BYTES}x}"


def _of_name(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=_BYTES).digest(), "little") | 1
