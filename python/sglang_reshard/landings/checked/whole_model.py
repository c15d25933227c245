"""Computes one digest of a whole model's weights, the same for any sharding of trainer and engine.

The sum, modulo 2^64, of the checksums of all that engine ranks keep, with each element counted once and each tensor's
checksum multiplied by an odd number derived from its name. It depends on names, shapes and the bits of the elements in
the engine's dtype, and not on the engine's size, the trainer's layout or the order of the tensors. Parameters that an
update leaves as they are count by their names and, where an engine knows them, by their versions.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from sglang_reshard.landings.checked.coefficients import MODULUS
from sglang_reshard.layout.regions import Region
from sglang_reshard.plan import TensorIndex

_BYTES = 8


def region_coefficients(
    tensor_index: TensorIndex, tensors: np.ndarray, view_of: np.ndarray, views: Sequence[tuple[str, Region]]
) -> np.ndarray | None:
    """Returns uint64, the factor of each region's checksum; None unless the regions cover each element exactly once.

    tensors, view_of  of each region: the number of its tensor, and of its (dtype, region) in `views`; no two alike

    Regions of one tensor overlap, and the model has no digest, if engine ranks share more than whole shards, such as
    scales of blocks that are split between ranks.
    """
    dtypes = sorted({dtype for dtype, _ in views})
    dtype_of = np.array([dtypes.index(dtype) for dtype, _ in views], np.int64)
    elements_of = np.zeros(len(views), np.int64)
    for number in np.unique(view_of).tolist():  # the others are unchecked
        elements_of[number] = views[number][1].numel
    tensor_dtypes = tensors.astype(np.int64) * len(dtypes) + dtype_of[view_of]
    counted = np.zeros(len(tensor_index.class_of) * len(dtypes), np.int64)
    np.add.at(counted, tensor_dtypes, elements_of[view_of])
    present = np.unique(tensor_dtypes)
    numel = np.array([math.prod(c.shape) for c in tensor_index.classes], np.int64)[tensor_index.class_of]
    if not np.array_equal(counted[present], numel[present // max(1, len(dtypes))]):
        return None
    factors = np.zeros(len(tensor_index.class_of), np.uint64)
    for number in np.unique(tensors).tolist():
        factors[number] = _name_coefficient(tensor_index.layout.tensors[number].name)
    return factors[tensors]


def model_digest(parts: Iterable[int | None]) -> str:
    """Returns the digest of all trainer ranks' parts; empty if one of them has none."""
    found = list(parts)
    return "" if None in found else _digest(filter(None, found))


def digest_of_sums(names: Iterable[str], sums: Iterable[int]) -> str:
    """Returns the digest of a model whose whole tensors have these checksums."""
    return _digest(_name_coefficient(name) * int(tensor) for name, tensor in zip(names, sums, strict=True))


def with_kept(digest: str, kept: Iterable[str]) -> str:
    """Returns the digest of weights whose parameters `kept` were not changed: it has their names.

    Their values are in no checkpoint tensor that was sent, and in shards that depend on the engine. An empty digest
    stays empty.
    """
    if not digest:
        return ""
    return _with_names(digest, {f"kept {name}" for name in kept})


def with_versions(digest: str, versions: Mapping[str, str]) -> str:
    """Returns the digest of weights whose kept parameters have these versions: parameter -> weight_version.

    Two engines whose parameters of one name were brought by different updates have different digests. Without kept
    parameters the digest stays as it is, and so does an empty one.
    """
    if not digest or not versions:
        return digest
    return _with_names(digest, {json.dumps(["version", version, name]) for name, version in versions.items()})


def _with_names(digest: str, names: Iterable[str]) -> str:
    return _digest([int(digest, 16), *map(_name_coefficient, names)])


def _digest(sums: Iterable[int]) -> str:
    """Returns the sum as 16 hexadecimal digits."""
    return f"{sum(sums) % MODULUS:0{2 * _BYTES}x}"


def _name_coefficient(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=_BYTES).digest(), "little") | 1
