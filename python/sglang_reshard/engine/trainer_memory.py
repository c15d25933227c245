"""The trainer ranks' memory as one engine rank reaches it: handles, what can be mapped, and what is."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.memory.mapping import Handles, PeerMemory, unreadable_reason
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.protocol.session import Session, handles_key
from sglang_reshard.protocol.validation import check_handles


class TrainerMemory:
    """Keeps mapped memory, and which trainer ranks' memory cannot be mapped, as long as their handles are the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fetched: dict[int, tuple[str, Handles]] = {}  # by trainer rank, with their content hash
        self._tried: dict[int, tuple[str, str]] = {}  # by trainer rank: content hash, and why they cannot be mapped
        self._mapped: dict[int, tuple[str, PeerMemory]] = {}  # by trainer rank, with the content hash of the handles
        self.tried_handles: tuple[str, ...] = ()  # content hashes in the request that `unreadable` was last called for

    def unreadable(
        self,
        trainer_ranks: Iterable[int],
        request: DistributedUpdateWeightsReq,
        session: Session,
        layout: SourceLayout,
    ) -> dict[int, str]:
        """Returns trainer rank -> why its memory cannot be mapped, for those whose memory cannot.

        Tries one handle of each that has new ones. No mapping of its old ones may be in use any more.
        """
        found = {}
        for trainer_rank in trainer_ranks:
            digest = request.handles[trainer_rank]
            if self._tried.get(trainer_rank, ("",))[0] != digest:
                if trainer_rank in self._mapped:
                    self._close([trainer_rank])
                handles = self._fetch(trainer_rank, request, session, layout)
                self._tried[trainer_rank] = digest, unreadable_reason(handles, trainer_rank, self._device)
            if reason := self._tried[trainer_rank][1]:
                found[trainer_rank] = reason
        self.tried_handles = request.handles
        return found

    def map(
        self,
        trainer_ranks: Collection[int],
        request: DistributedUpdateWeightsReq,
        session: Session,
        layout: SourceLayout,
    ) -> dict[int, PeerMemory]:
        """Maps the memory of these trainer ranks, and unmaps that of others."""
        # Old mappings first: new memory may have the address of freed memory, and even its handle.
        current = {t for t in trainer_ranks if self._mapped.get(t, ("",))[0] == request.handles[t]}
        self._close([t for t in self._mapped if t not in current])
        for trainer_rank in trainer_ranks:
            if trainer_rank not in self._mapped:
                handles = self._fetch(trainer_rank, request, session, layout)
                memory = PeerMemory(trainer_rank, handles, self._device)
                self._mapped[trainer_rank] = request.handles[trainer_rank], memory
        self._fetched = {}
        return {trainer_rank: self._mapped[trainer_rank][1] for trainer_rank in trainer_ranks}

    def unmap(self) -> None:
        """Unmaps all. No view of it may be left."""
        self._close(list(self._mapped))

    def clear(self) -> None:
        """Unmaps all, and forgets what could be mapped: the next update tries it again."""
        self.unmap()
        self._fetched, self._tried, self.tried_handles = {}, {}, ()

    def _close(self, trainer_ranks: Collection[int]) -> None:
        if trainer_ranks:
            runtime().synchronize([self._device])  # a failed update may have left copies under way
        for trainer_rank in trainer_ranks:
            self._mapped.pop(trainer_rank)[1].close()

    def _fetch(
        self, trainer_rank: int, request: DistributedUpdateWeightsReq, session: Session, layout: SourceLayout
    ) -> Handles:
        digest = request.handles[trainer_rank]
        known = self._fetched.get(trainer_rank)
        if known is None or known[0] != digest:
            what = f"the memory handles of trainer rank {trainer_rank}"
            handles = session.get(handles_key(trainer_rank, digest), Handles, what, request.timeout_s)
            check_handles(handles, layout, trainer_rank)
            known = self._fetched[trainer_rank] = digest, handles
        return known[1]
