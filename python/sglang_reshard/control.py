"""How the engine's ranks exchange verdicts and needs."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from sglang_reshard.errors import DeadlineExceeded
from sglang_reshard.messages import decode, encode

T = TypeVar("T")

# The first all-gather carries each message's length and beginning: room for what ranks tell each other in an
# update for which nothing changed, so that it is the only one then.
FRAME_BYTES = 512
_LENGTH_BYTES = 8


class Control:
    """All-gathers of small messages over a CPU process group of the engine's own."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.rank, self.size, self._group = rank, size, group

    def gather(self, message: T, timeout_s: float) -> list[T]:
        """Every engine rank's message, in rank order.

        Collective: a rank that fails must still come here and say so, or the others wait until the
        deadline, which raises DeadlineExceeded.
        """
        data = encode(message)
        framed = len(data).to_bytes(_LENGTH_BYTES, "big") + data
        parts = self._all_gather(framed[:FRAME_BYTES], FRAME_BYTES, timeout_s)
        lengths = [int.from_bytes(part[:_LENGTH_BYTES], "big") for part in parts]
        # All ranks see all lengths, so that all of them go on to the second all-gather or none.
        left = _LENGTH_BYTES + max(lengths) - FRAME_BYTES
        if left > 0:
            rests = self._all_gather(framed[FRAME_BYTES:], left, timeout_s)
            parts = [part + rest for part, rest in zip(parts, rests, strict=True)]
        messages = (part[_LENGTH_BYTES : _LENGTH_BYTES + n] for part, n in zip(parts, lengths, strict=True))
        return [decode(m, type(message)) for m in messages]

    def _all_gather(self, data: bytes, nbytes: int, timeout_s: float) -> list[bytes]:
        """Every rank's `data`, filled up to `nbytes`."""
        mine = torch.frombuffer(bytearray(data.ljust(nbytes, b"\0")), dtype=torch.uint8)
        parts = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(self.size)]
        try:
            work = dist.all_gather(parts, mine, group=self._group, async_op=True)
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise DeadlineExceeded(
                f"engine rank {self.rank}: another engine rank did not answer within {timeout_s:.0f} s "
                f"or has gone: {error}"
            ) from error
        return [part.numpy().tobytes() for part in parts]
