"""Prepares and runs one trainer rank's transfers to one engine, as that engine's commands say.

    Prepare  make this rank's end of the route, and report ready
    Connect  connect to the engine ranks
    Start    send

The end is kept, so that the next update needs only `Start`, or nothing if engine ranks read by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_reshard.errors import Mismatch
from sglang_reshard.protocol.messages import Command, Connect, Prepare, Start
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import EngineScope
from sglang_reshard.routes import trainer_end
from sglang_reshard.routes.base import Meeting, TrainerEnd, TrainerSide
from sglang_reshard.trainer.publisher import PublishedShards

Shards = Callable[[], Sequence[torch.Tensor]]  # returns this rank's, in the layout's order


@dataclass(slots=True)
class _Prepared:
    """An end that is kept between updates.

    shards, pages  `PublishedShards.identity` and `PublishedShards.pages`
    """

    command: Prepare
    shards: tuple[object, ...]
    pages: tuple[object, ...]
    end: TrainerEnd
    connected: bool = False


class EngineTransfers:
    """One trainer rank's side of the transfers to one engine. Commands of one engine are executed one at a time."""

    def __init__(
        self,
        session: Session,
        engine: int,
        trainer_rank: int,
        shared: Mapping[str, Any],
        engines: Callable[[], int] = lambda: 1,
    ) -> None:
        """
        shared   by the name of a route, what its ends share among all engines of the session
        engines  returns how many are updated at the same time
        """
        self._session, self._engine, self._rank, self._shared = session, engine, trainer_rank, shared
        self._engines = engines
        self._kept: dict[str, Any] = {}
        self._prepared: _Prepared | None = None

    def prepared_transfer(self, published: PublishedShards) -> str:
        """Returns the transfer that is prepared for these shards; empty if there is none.

        One for other shards is kept until the next `Prepare`: an update that is refused for its names is followed by
        one with the right ones.
        """
        prepared = self._prepared
        if prepared is None or not prepared.connected:
            return ""
        if prepared.end.holds_pages and prepared.pages != published.pages:
            return ""
        return prepared.command.transfer if prepared.shards == published.identity else ""

    @property
    def writable_bytes(self) -> int:
        """Bytes of this rank's memory that engine ranks could write to."""
        return self._prepared.end.writable_bytes if self._prepared is not None else 0

    def offer(self, published: PublishedShards, update: int) -> dict[int, bytes] | None:
        """Returns by engine rank what it can take instead of all weights; None if the engine needs all."""
        if not self.prepared_transfer(published) or self._prepared is None:
            return None
        return self._prepared.end.offer(update)

    def commit(self, update: int) -> None:
        """The engine has the weights of `update`. A failure here does not fail an update."""
        if self._prepared is not None:
            self._prepared.end.commit(update)

    def execute(self, scope: EngineScope, command: Command, published: PublishedShards, shards: Shards) -> None:
        if isinstance(command, Prepare):
            self.release()
            self._prepared = self._prepare(command, published, shards())
            scope.report_ready(self._rank)
        elif (prepared := self._prepared) is None:
            return  # Prepare failed, which has aborted the update
        elif isinstance(command, Connect):
            prepared.end.connect(Meeting(self._session, scope.scope, scope.update))
            prepared.connected = True
        elif isinstance(command, Start):
            if command.transfer != prepared.command.transfer or not prepared.connected:
                raise Mismatch(
                    f"trainer rank {self._rank} was asked to start transfer {command.transfer!r}, but has prepared "
                    f"{prepared.command.transfer!r}. This is a bug; please report it"
                )
            prepared.end.start(command.taken)

    def release(self) -> None:
        """Drops connections, buffers, and the views that keep the shards' memory."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.end.close()

    def abort(self, _reason: str) -> None:
        """Ends this rank's waits for the engine's ranks. Called from another thread."""
        prepared = self._prepared
        if prepared is not None:
            prepared.end.abort()

    def _prepare(self, command: Prepare, published: PublishedShards, shards: Sequence[torch.Tensor]) -> _Prepared:
        side = TrainerSide(
            session=self._session,
            engine=self._engine,
            trainer_rank=self._rank,
            layout=published.source,
            identity=published.identity,
            shards=shards,
            transfer=command.transfer,
            timeout_s=command.timeout_s,
            kept=self._kept,
            shared=self._shared,
            engines=self._engines(),
        )
        return _Prepared(command, published.identity, published.pages, trainer_end(side, command))
