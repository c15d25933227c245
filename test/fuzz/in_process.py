"""Both sides of an update in one process: no connections, and memory that shows what was written beside it."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from sglang_reshard.trace.program import Copy
from support.plans import empty_targets

GUARD_BYTES = 256
_CANARY = 0xA5
_DEADLINE_S = 30.0


class Guarded:
    """The targets of some copies, each in memory of its own, with canaries before and after it.

    gaps  what the targets hold before anything lands: what is left of it afterwards was not to be written
    """

    def __init__(self, copies: Sequence[Copy], dtypes: dict[str, torch.dtype]) -> None:
        self.memory: dict[str, bytearray] = {}
        self.targets: dict[str, torch.Tensor] = {}
        for name, target in empty_targets(copies).items():
            dtype, end = dtypes[name], target.numel()
            memory = self.memory[name] = bytearray([_CANARY]) * (2 * GUARD_BYTES + end * dtype.itemsize)
            self.targets[name] = torch.frombuffer(memory, dtype=dtype, count=end, offset=GUARD_BYTES)

    def __eq__(self, other: object) -> bool:
        """Equal to the last bit, canaries and gaps included."""
        return isinstance(other, Guarded) and self.memory == other.memory

    __hash__ = None  # type: ignore[assignment]


class Mail:
    """Stands in for `Peers`: what is sent is kept until it is received."""

    def __init__(self, me: int, boxes: dict[tuple[int, int], deque[torch.Tensor]]) -> None:
        self._me, self._boxes = me, boxes

    def send(self, parcels: Any) -> Mail:
        for peer, buffer in parcels:
            self._boxes.setdefault((self._me, peer), deque()).append(buffer.clone())
        return self

    def receive(self, parcels: Any) -> Any:
        return _Arriving([(buffer, self._boxes[peer, self._me].popleft()) for peer, buffer in parcels])

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Arriving:
    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = pairs

    def wait(self) -> None:
        for buffer, data in self._pairs:
            assert buffer.shape == data.shape, "both ends cut the link into other messages"
            buffer.copy_(data)


class Rooms:
    """What the groups of one update broadcast. As in a process group, a member's n-th goes with the others' n-th."""

    def __init__(self) -> None:
        self._sent: dict[object, queue.Queue[tuple[int, torch.Tensor]]] = {}
        self._lock = threading.Lock()

    def queue(self, members: tuple[int, ...], number: int, rank: int) -> queue.Queue[tuple[int, torch.Tensor]]:
        with self._lock:
            return self._sent.setdefault((members, number, rank), queue.Queue())


class RoomGroups:
    """Stands in for one engine rank's `Communicators`; the ranks run in threads."""

    def __init__(self, rooms: Rooms, rank: int) -> None:
        self._rooms, self._rank = rooms, rank
        self._made: dict[tuple[int, ...], _RoomGroup] = {}

    def get(self, members: tuple[int, ...]) -> _RoomGroup:
        return self._made.setdefault(members, _RoomGroup(self._rooms, members, self._rank))


class _RoomGroup:
    def __init__(self, rooms: Rooms, members: tuple[int, ...], rank: int) -> None:
        assert rank in members
        self._rooms, self.members, self._rank = rooms, members, rank
        self._number = 0

    def broadcast(self, buffer: torch.Tensor, root: int) -> _RoomBroadcast:
        self._number += 1
        if root == self._rank:
            for member in self.members:
                self._rooms.queue(self.members, self._number, member).put((root, buffer.clone()))
        return _RoomBroadcast(self._rooms.queue(self.members, self._number, self._rank), root, buffer)


class _RoomBroadcast:
    def __init__(self, arriving: queue.Queue[tuple[int, torch.Tensor]], root: int, buffer: torch.Tensor) -> None:
        self._arriving, self._root, self._buffer = arriving, root, buffer

    def wait(self) -> None:
        sender, data = self._arriving.get(timeout=_DEADLINE_S)
        assert (sender, data.shape) == (self._root, self._buffer.shape), "members have other rounds"
        self._buffer.copy_(data)
