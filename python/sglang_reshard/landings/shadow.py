"""Shadow weights: memory in addition to an engine rank's live weights, where a staged update arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import psutil
import torch

from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.trace.program import Program

NO_ROOM = "staged=True needs"  # begins the error of an update for whose shadow weights there is no memory


class Apart:
    """Memory from which nothing is served before the steps of its program run: it can be written at any time."""

    def __init__(self, program: Program) -> None:
        self.program, self.nbytes = program, shadow_bytes(program)

    def begin(self) -> None:
        """Prepares for the weights of an update."""

    def commit(self) -> None:
        """Makes live what has arrived."""


class Shadow(Apart):
    """Memory that is written instead of the targets of `live`, and is copied to them at the commit.

    Storages are copied whole in both directions, so that what no copy of the program writes stays as it is.
    """

    def __init__(self, live: Program) -> None:
        kept = _kept(live)
        shadow = {name: torch.empty_like(target) for name, target in kept.items()}
        super().__init__(replace(live, targets=live.targets | shadow))
        self.live = live
        self._from_live, self._to_live = _copies(shadow, kept), _copies(kept, shadow)

    def begin(self) -> None:
        self._from_live.run()

    def commit(self) -> None:
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
            f"{NO_ROOM} {nbytes:,} bytes in addition to the weights ({needed:,} bytes in total there), but "
            f"{where} has {free:,} bytes free. Update without staged=True"
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
