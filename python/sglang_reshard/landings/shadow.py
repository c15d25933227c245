"""Allocates shadow weights: memory beside an engine rank's live weights, in which a staged update arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import psutil
import torch

from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.trace.program import Program


@dataclass(frozen=True, slots=True)
class ShadowWeights:
    """Memory of `nbytes` that `program` writes to, and otherwise does what `live` does.

    Storages are copied whole in both directions, so that what no copy of the program writes stays as it is.
    """

    live: Program
    program: Program
    nbytes: int
    _from_live: CopyList
    _to_live: CopyList

    @classmethod
    def of(cls, live: Program) -> ShadowWeights:
        kept = _kept(live)
        shadow = {name: torch.empty_like(target) for name, target in kept.items()}
        program = replace(live, targets=live.targets | shadow)
        return cls(live, program, shadow_bytes(live), _copies(shadow, kept), _copies(kept, shadow))

    @classmethod
    def in_place(cls, program: Program) -> ShadowWeights:
        """Returns the memory that `program` writes to, which is not live before its steps run."""
        nothing = _copies({}, {})
        return cls(program, program, shadow_bytes(program), nothing, nothing)

    def copy_from_live(self) -> None:
        self._from_live.run()

    def copy_to_live(self) -> None:
        self._to_live.run()


def shadow_bytes(live: Program) -> int:
    """Returns the bytes that the shadow weights of `live` take."""
    return sum(t.numel() * t.element_size() for t in _kept(live).values())


def check_room(nbytes: int, ranks_on_host: int, device: torch.device) -> None:
    """Raises Unsupported, with the figures, if there is no memory for `nbytes` more.

    ranks_on_host  engine ranks that take as much of the same host memory, this one included; a GPU's is its own
    """
    if runtime().is_gpu(device):
        free, needed, where = runtime().free_bytes(device), nbytes, f"GPU {device}"
    else:
        free, needed, where = psutil.virtual_memory().available, nbytes * ranks_on_host, "its host"
    if free < needed:
        raise Unsupported(
            f"staged=True takes {nbytes:,} bytes beside the weights "
            f"({needed:,} in total there), but {where} has {free:,} bytes free; update without staged=True"
        )


def _copies(destinations: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> CopyList:
    copies = CopyList()
    for name, destination in destinations.items():
        copies.add(destination, sources[name])
    copies.build()
    return copies


def _kept(live: Program) -> dict[str, torch.Tensor]:
    """Returns the storages that hold weights between updates."""
    return {n: t for n, t in live.targets.items() if not n.startswith("scratch/") and n not in live.arrivals}
