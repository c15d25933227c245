"""Memory beside an engine rank's live weights, in which new ones arrive and are verified before they count."""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil
import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.trace import Program


@dataclass(frozen=True, slots=True)
class ShadowWeights:
    """`program` lands in this memory, and otherwise does what `live` does.

    Storages are kept apart whole: what no copy of the program writes comes along from the live weights, and goes
    back to them as it was.
    """

    live: Program
    program: Program

    @classmethod
    def of(cls, live: Program) -> ShadowWeights:
        targets = {
            name: target if _is_scratch(name) else torch.empty_like(target) for name, target in live.targets.items()
        }
        return cls(live, replace(live, targets=targets))

    def refresh(self) -> None:
        """Begin with what is live now."""
        _copy(self.program, self.live)

    def commit(self) -> None:
        """Make what has arrived live: a copy within this rank's own memory."""
        _copy(self.live, self.program)


def staged_bytes(live: Program) -> int:
    """Bytes that a `ShadowWeights` takes."""
    return sum(t.numel() * t.element_size() for name, t in live.targets.items() if not _is_scratch(name))


def check_room(nbytes: int, neighbours: int, engine_rank: int, device: torch.device) -> None:
    """Raise Unsupported, saying how much is needed, where there is no memory for so many bytes more.

    neighbours  engine ranks that take as much of the same memory, this one included; on a GPU it has its own
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        needed, where = nbytes, f"GPU {device}"
    else:
        free, needed, where = psutil.virtual_memory().available, nbytes * neighbours, "its host"
    if free < needed:
        raise Unsupported(
            f"engine rank {engine_rank}: staged=True takes {nbytes:,} bytes beside the weights "
            f"({needed:,} in all there), but {where} has {free:,} bytes free; update without it"
        )


def _copy(to: Program, source: Program) -> None:
    names = [name for name in to.targets if not _is_scratch(name)]
    if names:
        with torch.inference_mode():
            torch._foreach_copy_([to.targets[n] for n in names], [source.targets[n] for n in names])


def _is_scratch(name: str) -> bool:
    return name.startswith("scratch/")
