"""Copies on one GPU: a few kernel launches over tables that stay on the GPU from update to update."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_reshard.copying.copy_table import TileKind, launches_of
from sglang_reshard.copying.host_copies import Pair
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.observability.logs import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KernelCopies:
    """Kinds of tiles, and the boxes and tiles of each. They hold addresses: the caller keeps the tensors alive."""

    device: torch.device
    launches: tuple[tuple[TileKind, torch.Tensor, torch.Tensor], ...]

    @classmethod
    def of(cls, pairs: Sequence[Pair], device: torch.device) -> tuple[KernelCopies, list[Pair]]:
        """Returns the copies that kernels make on `device`, ready to run, and the pairs that are left to torch.

        All of them are left, with a warning, on a host that has no Triton or on which it cannot compile.
        """
        reachable = [all(runtime().reachable_by_kernels(tensor, device) for tensor in pair) for pair in pairs]
        found, rest = launches_of(itertools.compress(pairs, reachable))
        rest += [pair for pair, is_reachable in zip(pairs, reachable, strict=True) if not is_reachable]
        if not found:
            return cls(device, ()), rest
        # A table has arrived when `to` returns, for every stream: torch waits for a copy from pageable memory.
        on_device = tuple(
            (launch.kind, torch.from_numpy(launch.boxes).to(device), torch.from_numpy(launch.tiles).to(device))
            for launch in found
        )
        try:
            # Where nothing runs on a GPU, Triton is not imported.
            from sglang_reshard.copying.copy_kernel import compile_kernel

            with runtime().using(device):
                for launch in found:
                    compile_kernel(launch.kind, device)
        except Exception as error:  # Triton's, a C compiler's, the file system's that it keeps its kernels in
            logger.warning("copies run one by one on %s, which is slow: Triton cannot be used: %s", device, error)
            return cls(device, ()), list(pairs)
        return cls(device, on_device), rest

    @property
    def table_bytes(self) -> int:
        return sum(table.nbytes for _, *tables in self.launches for table in tables)

    def run(self) -> None:
        """Starts the copies in the device's current stream."""
        if self.launches:
            from sglang_reshard.copying.copy_kernel import launch

            with runtime().using(self.device):
                for kind, boxes, tiles in self.launches:
                    launch(kind, boxes, tiles)
