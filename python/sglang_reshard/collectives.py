"""Small typed messages over a trainer's process group; nothing is pickled."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from sglang_reshard.messages import decode, encode

T = TypeVar("T")


def broadcast_message(message: T | None, kind: type[T], group: dist.ProcessGroup) -> T:
    """The message of the group's first rank, on every rank. Collective over a CPU group."""
    root = dist.get_process_group_ranks(group)[0]
    data = torch.frombuffer(bytearray(encode(message)), dtype=torch.uint8) if message is not None else None
    size = torch.tensor([data.numel() if data is not None else 0])
    dist.broadcast(size, root, group=group)
    if data is None:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, root, group=group)
    return decode(data.numpy().tobytes(), kind)
