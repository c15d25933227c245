"""How the engine's ranks exchange verdicts and needs."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from sglang_reshard.errors import DeadlineExceeded
from sglang_reshard.messages import decode, encode

T = TypeVar("T")

# The first exchange carries each message's length and beginning: room for what ranks tell each other in an
# update for which nothing changed, so that it is the only one then.
FRAME_BYTES = 512
_LENGTH_BYTES = 8
_TAG = 0x5EA2  # no message of the engine's own over this group has it


class Control:
    """Gathers small messages on every engine rank, over a CPU process group (gloo) of the engine's own.

    By way of the first rank, which hears all and tells all. Gloo's all-gather passes messages on from rank to
    rank, each of which has to be woken for it: on 2 cores that takes 9 times as long with 4 ranks, 6 with 16.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.rank, self.size, self._group = rank, size, group

    def gather(self, message: T, timeout_s: float) -> list[T]:
        """Every engine rank's message, in rank order.

        Collective: a rank that fails must still come here and say so, or the others wait until the
        deadline, which raises DeadlineExceeded.
        """
        data = encode(message)
        framed = len(data).to_bytes(_LENGTH_BYTES, "big") + data
        parts = self._exchange(framed[:FRAME_BYTES], FRAME_BYTES, timeout_s)
        lengths = [int.from_bytes(part[:_LENGTH_BYTES], "big") for part in parts]
        # All ranks see all lengths, so that all of them go on to the second exchange or none.
        left = _LENGTH_BYTES + max(lengths) - FRAME_BYTES
        if left > 0:
            rests = self._exchange(framed[FRAME_BYTES:], left, timeout_s)
            parts = [part + rest for part, rest in zip(parts, rests, strict=True)]
        messages = (part[_LENGTH_BYTES : _LENGTH_BYTES + n] for part, n in zip(parts, lengths, strict=True))
        return [decode(m, type(message)) for m in messages]

    def _exchange(self, data: bytes, nbytes: int, timeout_s: float) -> list[bytes]:
        """Every rank's `data`, filled up to `nbytes`."""
        parts = torch.empty(self.size, nbytes, dtype=torch.uint8)
        parts[self.rank] = torch.frombuffer(bytearray(data.ljust(nbytes, b"\0")), dtype=torch.uint8)
        others = range(1, self.size)
        end = time.monotonic() + timeout_s
        if self.rank == 0:
            for work in [(peer, self._group.recv([parts[peer]], peer, _TAG)) for peer in others]:
                self._wait(*work, end, timeout_s)
            for work in [(peer, self._group.send([parts], peer, _TAG)) for peer in others]:
                self._wait(*work, end, timeout_s)
        else:
            self._wait(0, self._group.send([parts[self.rank]], 0, _TAG), end, timeout_s)
            self._wait(0, self._group.recv([parts], 0, _TAG), end, timeout_s)
        return [part.tobytes() for part in parts.numpy()]

    def _wait(self, peer: int, work: dist.Work, end: float, timeout_s: float) -> None:
        try:
            work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
        except RuntimeError as error:
            raise DeadlineExceeded(
                f"engine rank {self.rank}: engine rank {peer} did not answer within {timeout_s:.0f} s "
                f"or has gone: {error}"
            ) from error
