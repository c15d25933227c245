"""What engine ranks tell each other before they plan together: what each lacks, small enough to gather."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec
import numpy as np

from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.manifest import inflate
from sglang_reshard.plan.read_plan import ReadPlan
from sglang_reshard.plan.tensor_index import TensorIndex


class RankDemand(msgspec.Struct, frozen=True):
    """What one engine rank lacks.

    pieces       compressed bits: bit i is set when the rank needs elements of piece i
    least_bytes  bytes that must reach it at the least, in the source's dtypes
    host, cores  where it runs; memory can be read only on the same host
    links        trainer rank -> (bytes, boxes) that it would take from it, if it took nothing but these
    digest       content hash of those boxes
    """

    pieces: bytes
    least_bytes: int
    host: str
    cores: int
    links: dict[int, tuple[int, int]]
    digest: str


def rank_demand(catalog: TensorIndex, taken: ReadPlan, host: str, cores: int = 1) -> RankDemand:
    """The needs of an engine rank on `host`, which has so many cores."""
    needed = np.zeros(catalog.pieces, bool)
    needed[taken.pieces(catalog)] = True
    bits = zlib.compress(np.packbits(needed, bitorder="little").tobytes(), 1)
    return RankDemand(bits, taken.least_bytes(), host, cores, taken.links(), taken.digest())


def demanded_shards(catalog: TensorIndex, needs: Sequence[RankDemand]) -> np.ndarray:
    """A bool for each engine rank and piece."""
    nbytes = -(-catalog.pieces // 8)
    rows = [
        np.frombuffer(inflate(n.pieces, nbytes, f"what engine rank {e} lacks"), np.uint8) for e, n in enumerate(needs)
    ]
    if any(len(row) != nbytes for row in rows):
        raise Mismatch("what engine ranks lack is not of one layout; this is a bug, please report it")
    return np.unpackbits(np.stack(rows), axis=1, count=catalog.pieces, bitorder="little").astype(bool)


def unread_tensors(catalog: TensorIndex, needs: Sequence[RankDemand]) -> tuple[str, ...]:
    """Names of the tensors that no engine rank needs any part of; empty ones are not counted."""
    upto = np.concatenate([[0], np.cumsum(demanded_shards(catalog, needs).any(axis=0))])
    unused = np.flatnonzero(upto[catalog.first[1:]] == upto[catalog.first[:-1]]).tolist()
    tensors = catalog.layout.tensors
    return tuple(tensors[i].name for i in unused if tensors[i].spec.numel)
