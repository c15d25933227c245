"""Divides a GPU's multiprocessors (SMs) among the NCCL communicators of a process.

A kernel of NCCL's waits for those of its peers. Communicators that are in use at once, those of one transfer or of
several engines, are used in another order on another rank. They cannot wait for each other if all of their kernels find
room on a GPU together, a thread block (CTA) on each multiprocessor.
"""

from __future__ import annotations

import threading
import weakref

import torch
import torch.distributed as dist

from sglang_reshard.gpu.runtime import runtime

MOST = 16  # of one communicator: more would not make it faster


class CtaShares:
    """The CTAs of this process's communicators, by GPU."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = weakref.WeakKeyDictionary[object, tuple[torch.device, int]]()

    def agree(self, owner: object, device: torch.device, at_once: int, store: dist.Store, rank: int, size: int) -> int:
        """Returns the CTAs of a communicator of `size` ranks, the same on all of them. Collective.

        owner    has them until `release`, or until it is gone
        at_once  communicators that this rank will use at the same time on `device`

        NCCL itself does not compare the ranks' limits, and hangs if they differ (`ncclTopoPostset`).
        """
        keys = [f"ctas/{other}" for other in range(size)]
        store.set(keys[rank], str(self._take(owner, device, at_once)))
        store.wait(keys)
        least = min(int(store.get(key)) for key in keys)
        with self._lock:
            self._taken[owner] = device, least
        return least

    def _take(self, owner: object, device: torch.device, at_once: int) -> int:
        room = runtime().multiprocessors(device)
        with self._lock:
            taken = sum(ctas for where, ctas in self._taken.values() if where == device)
            found = max(1, min(MOST, room // at_once, room - taken))
            self._taken[owner] = device, found
        return found

    def in_use(self) -> bool:
        """Returns whether this process has any communicators."""
        with self._lock:
            return len(self._taken) > 0

    def release(self, owner: object) -> None:
        with self._lock:
            self._taken.pop(owner, None)


CTAS = CtaShares()
