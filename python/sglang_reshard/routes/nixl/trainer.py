"""A trainer rank's end of nixl: registers its shards once, and takes no further part."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_reshard.protocol.messages import Prepare
from sglang_reshard.routes.base import TrainerEnd, TrainerSide
from sglang_reshard.routes.nixl.remote_shards import put_remote_shards, trainer_name
from sglang_reshard.routes.nixl.source import NixlSource
from sglang_reshard.routes.p2p.ask import Links


class NixlTrainerEnd(TrainerEnd):
    """Keeps the shards registered; they are deregistered when it is closed."""

    holds_pages = True

    def __init__(self, side: TrainerSide, command: Prepare, others: Sequence[torch.Tensor] = ()) -> None:
        """Registers `others`, too, which are no shards."""
        links = command.asked(Links)
        links.check(side.layout.trainer_ranks)
        self._source: NixlSource | None = None
        if links.of_trainer_rank(side.trainer_rank):
            self._source = NixlSource(trainer_name(side.trainer_rank), side.shards, others)
            self.writable_bytes = self._source.writable_bytes
            put_remote_shards(side.session, side.engine, side.trainer_rank, self._source.remote)

    def place(self, tensor: torch.Tensor) -> tuple[str, int, int]:
        """Returns where engine ranks read a tensor that is registered: kind of memory, GPU, address."""
        assert self._source is not None, "registered"
        return self._source.place(tensor)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
