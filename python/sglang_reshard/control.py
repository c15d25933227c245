"""How engine ranks tell each other, in a few bytes, how they are doing."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from sglang_reshard.collectives import as_tensor, from_tensor
from sglang_reshard.errors import DeadlineExceeded

T = TypeVar("T")


class Control:
    """All-gathers of small messages over a CPU process group of the engine's own."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.rank, self.size, self._group = rank, size, group

    def gather(self, message: T, timeout_s: float) -> list[T]:
        """Every engine rank's message, in rank order.

        Collective: a rank that fails must still come here and say so, or the others wait until the
        deadline, which raises DeadlineExceeded.
        """
        data = as_tensor(message)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._all_gather(sizes, torch.tensor([data.numel()]), timeout_s)
        longest = max(int(n) for n in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._all_gather(parts, padded, timeout_s)
        return [from_tensor(part[: int(n)], type(message)) for part, n in zip(parts, sizes, strict=True)]

    def _all_gather(self, into: list[torch.Tensor], tensor: torch.Tensor, timeout_s: float) -> None:
        try:
            work = dist.all_gather(into, tensor, group=self._group, async_op=True)
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise DeadlineExceeded(
                f"engine rank {self.rank}: another engine rank did not answer within {timeout_s:.0f} s "
                f"or has gone: {error}"
            ) from error
