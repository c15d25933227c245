"""The trainer ranks' memory as one engine rank reaches it: its handles, the memory that can be mapped, and the mapped
memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from sglang_reshard.engine.context import UpdateContext
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.memory.mapping import Handles
from sglang_reshard.memory.peer_memory import PeerMemory, ShardRead, unmap, unreadable_reason
from sglang_reshard.protocol.session import PUBLISHED_S, handles_key
from sglang_reshard.protocol.validation import check_handles


class TrainerMemory:
    """Keeps mapped memory, and which trainer ranks' memory cannot be mapped, as long as their handles are the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fetched: dict[int, tuple[str, Handles]] = {}  # by trainer rank, with their content hash
        self._tried: dict[int, tuple[str, str]] = {}  # by trainer rank: content hash, and why they cannot be mapped
        self._mapped: dict[int, tuple[str, PeerMemory]] = {}  # by trainer rank, with the content hash of the handles
        self.tried_handles: tuple[str, ...] = ()  # content hashes in the request that `unreadable` was last called for

    def unreadable(self, trainer_ranks: Iterable[int], context: UpdateContext, layout: SourceLayout) -> dict[int, str]:
        """Returns trainer rank -> why its memory cannot be mapped, for those whose memory cannot.

        Tries one handle of each that has new ones. No mapping of its old ones may still be in use.
        """
        tried = [(t, context.request.handles[t]) for t in trainer_ranks]
        new = [(t, digest) for t, digest in tried if self._tried.get(t, ("",))[0] != digest]
        self._close([t for t, _ in new if t in self._mapped])
        for trainer_rank, digest in new:
            handles = self._fetch(trainer_rank, context, layout)
            self._tried[trainer_rank] = digest, unreadable_reason(handles, trainer_rank, self._device)
        self.tried_handles = context.request.handles
        return {t: reason for t, _ in tried if (reason := self._tried[t][1])}

    def map(
        self, reads: Mapping[int, Sequence[ShardRead]], context: UpdateContext, layout: SourceLayout
    ) -> dict[int, PeerMemory]:
        """Maps what is read of trainer ranks' memory, by trainer rank, and unmaps that of others."""
        # Old mappings first: new memory may have the address of freed memory, and even its handle.
        digests = context.request.handles
        self._close(
            [
                t
                for t, (digest, memory) in self._mapped.items()
                if t not in reads or digest != digests[t] or not memory.covers(reads[t])
            ]
        )
        for trainer_rank, of_rank in reads.items():
            if trainer_rank not in self._mapped:
                handles = self._fetch(trainer_rank, context, layout)
                memory = PeerMemory(trainer_rank, handles, self._device, of_rank)
                self._mapped[trainer_rank] = digests[trainer_rank], memory
        self._fetched = {}
        return {trainer_rank: self._mapped[trainer_rank][1] for trainer_rank in reads}

    def unmap(self) -> None:
        """Unmaps all. No view of it may be left."""
        self._close(list(self._mapped))

    def clear(self) -> None:
        """Unmaps all, and forgets what could be mapped: the next update tries it again."""
        self.unmap()
        self._fetched, self._tried, self.tried_handles = {}, {}, ()

    def _close(self, trainer_ranks: Collection[int]) -> None:
        unmap([self._mapped.pop(trainer_rank)[1] for trainer_rank in trainer_ranks])

    def _fetch(self, trainer_rank: int, context: UpdateContext, layout: SourceLayout) -> Handles:
        digest, wait_s = context.request.handles[trainer_rank], min(context.request.timeout_s, PUBLISHED_S)
        known = self._fetched.get(trainer_rank)
        if known is None or known[0] != digest:
            what = f"the memory handles of trainer rank {trainer_rank}"
            handles = context.session.get(handles_key(trainer_rank, digest), Handles, what, wait_s)
            check_handles(handles, layout, trainer_rank)
            known = self._fetched[trainer_rank] = digest, handles
        return known[1]
