"""The question of engine ranks to trainer ranks to check weights, and the answer."""

from __future__ import annotations

import msgspec
import numpy as np

from sglang_reshard.landings.checked import whole_model
from sglang_reshard.landings.checked.regions import Selection

# Of weights that are not the trainer's. Trainer ranks replace it if they hold different values themselves.
CHANGED_UNDER_WAY = "Repeat the update; if it happens again, suspect this host's memory or its network"


class ChecksAsk(msgspec.Struct, frozen=True):
    """Asks for the checksums that the engine ranks' weights must have.

    regions    content hash of each engine rank's region set in the session
    selection  the elements that are compared
    names      content hash of the tensors' names in the digest; empty for the layout's own
    """

    regions: tuple[str, ...]
    selection: Selection
    names: str = ""


class Checksums(msgspec.Struct, frozen=True):
    """The checksums that one engine rank's weights must have, by all trainer ranks together.

    row    little-endian uint64 [groups]
    model  digest of all weights; empty if they have none
    """

    row: bytes
    model: str

    @property
    def values(self) -> np.ndarray:
        """Returns uint64 [groups]."""
        return np.frombuffer(self.row, "<u8").astype(np.uint64)


class PartialChecksums(msgspec.Struct, frozen=True):
    """One trainer rank's part of the checksums; the parts of all trainer ranks add up modulo 2^64.

    rows   checksums of the engine ranks that ask, little-endian uint64 [engine ranks, groups]
    model  of the whole model, see `whole_model`; None for a sample, and if the model has no digest
    """

    rows: bytes
    model: int | None


def summed(parts: list[PartialChecksums], engine_ranks: int) -> list[Checksums]:
    """Returns each engine rank's checksums, the sums of all trainer ranks' parts."""
    rows = np.add.reduce([np.frombuffer(part.rows, "<u8").reshape(engine_ranks, -1) for part in parts], axis=0)
    model = whole_model.model_digest(part.model for part in parts)
    return [Checksums(row.tobytes(), model) for row in rows]
