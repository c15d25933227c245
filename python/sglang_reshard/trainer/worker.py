"""Executes the commands of engines on one trainer rank, until trainer rank 0 reports the results.

Engine ranks that can read this rank's memory do so without a command: then a trainer rank only waits for the results,
unless the update is verified. Commands of several engines are executed at the same time. Each engine's, in order:

    Prepare  make this rank's end of the route, and report ready
    Connect  connect to the engine ranks
    Start    send

The end is kept, so that the next update needs only `Start`, or nothing if engine ranks read by themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_reshard import tasks
from sglang_reshard.errors import Aborted, Mismatch
from sglang_reshard.landings import trainer_checks
from sglang_reshard.protocol.messages import (
    Command,
    Connect,
    EngineCommand,
    Failure,
    Prepare,
    Question,
    Start,
    UpdateResults,
)
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import EngineScope, TrainerChannel
from sglang_reshard.routes import trainer_end
from sglang_reshard.routes.base import Meeting, TrainerEnd, TrainerSide
from sglang_reshard.trainer.publisher import PublishedShards

if TYPE_CHECKING:
    from sglang_reshard.landings import TrainerChecks

Shards = Callable[[], Sequence[torch.Tensor]]  # returns this rank's, in the layout's order


class TrainerWorker:
    """Executes commands on one trainer rank, of `size`."""

    def __init__(
        self,
        session: Session,
        trainer_rank: int,
        size: int,
        timeout_s: float,
        shared: Mapping[str, Any],
    ) -> None:
        """`shared`: see `EngineTransfers`."""
        self._session, self._rank, self._size, self._timeout_s = session, trainer_rank, size, timeout_s
        self._shared = shared
        self._transfers: dict[int, EngineTransfers] = {}  # of the engines that are updated
        self._checks: TrainerChecks | None = None  # once a landing has asked

    def set_engines(self, engines: Iterable[int]) -> None:
        """Sets the engines of further updates, by their numbers."""
        known = self._transfers
        self._transfers = {
            engine: known.pop(engine)
            if engine in known
            else EngineTransfers(self._session, engine, self._rank, self._shared, lambda: len(self._transfers))
            for engine in engines
        }
        for left_out in known.values():
            left_out.release()

    def prepared_transfers(self, published: PublishedShards) -> dict[int, str]:
        """Returns engine -> the transfer that is prepared for these shards."""
        found = {engine: transfers.prepared_transfer(published) for engine, transfers in self._transfers.items()}
        return {engine: transfer for engine, transfer in found.items() if transfer}

    def offers(self, prepared: Iterable[int], update: int) -> dict[int, dict[int, bytes]]:
        """Returns engine -> engine rank -> what it can take instead of all weights, for `prepared` engines that can."""
        found = {engine: self._transfers[engine].offer(update) for engine in prepared}
        return {engine: offer for engine, offer in found.items() if offer is not None}

    def run(self, channel: TrainerChannel, published: PublishedShards | None, shards: Shards) -> UpdateResults:
        """Executes commands until the update ends for all engines.

        A failure here aborts the update of the engine whose command it was, and is not raised: the results report it.
        Raises Aborted if no results arrive, and Mismatch if the shards have changed since a landing was answered, where
        peers could write to them.
        """
        given = functools.partial(_published, published, self._rank)
        scopes: dict[int, EngineScope] = {}  # of engines that have sent commands
        threads: dict[int, ThreadPoolExecutor] = {}  # one engine's commands are executed in order
        results = None

        def execute(message: EngineCommand) -> None:
            scope = scopes[message.engine]
            try:
                self._transfers[message.engine].execute(scope, message.command, given(), shards)
            except Aborted:
                pass  # the results report it
            except Exception as error:
                scope.abort_because(error, Failure.on(self._rank, error).message)

        try:
            with ExitStack() as stack:  # its end waits for what is executed, which the end of an engine's update ends
                for message in channel.messages(self._timeout_s):
                    if isinstance(message, UpdateResults):
                        results = message
                    elif isinstance(message.command, Question):
                        if self._checks is None:
                            self._checks = trainer_checks(self._session, self._rank, self._size, self._timeout_s)
                        self._checks.answer(channel, message.command, given, shards)
                    elif (engine := message.engine) in self._transfers:  # else it has been left out
                        if engine not in scopes:
                            scopes[engine] = scope = channel.engine(engine)
                            scope.on_abort(self._transfers[engine].abort)
                            stack.callback(scope.leave)
                        if len(self._transfers) == 1:
                            execute(message)
                            continue
                        if engine not in threads:
                            threads[engine] = ThreadPoolExecutor(1, f"{tasks.PREFIX} engine {engine}")
                            stack.enter_context(threads[engine])
                        threads[engine].submit(tasks.carried(execute), message)
        except BaseException:
            self.release()
            raise
        assert results is not None, "the last message"
        for engine, transfers in self._transfers.items():
            result = results.of.get(engine)
            if result is not None and result.failure is None:
                transfers.commit(channel.update)
            elif engine in scopes:
                transfers.release()
        if self._checks is not None:
            writable = any(transfers.writable_bytes for transfers in self._transfers.values())
            self._checks.end(channel.update, writable)
        return results

    def release(self) -> None:
        """Drops connections, buffers, and the views that keep the shards' memory."""
        if self._checks is not None:
            self._checks.release()
        for transfers in self._transfers.values():
            transfers.release()


def _published(published: PublishedShards | None, trainer_rank: int) -> PublishedShards:
    if published is None:
        raise Mismatch(f"trainer rank {trainer_rank} has published nothing that it could send")
    return published


@dataclass(slots=True)
class _Prepared:
    """An end that is kept between updates, and the shards for which it was made."""

    command: Prepare
    published: PublishedShards
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
        if prepared.end.holds_pages and prepared.published.pages != published.pages:
            return ""
        return prepared.command.transfer if prepared.published.identity == published.identity else ""

    @property
    def writable_bytes(self) -> int:
        """Bytes of this rank's memory that engine ranks could write to."""
        return self._prepared.end.writable_bytes if self._prepared is not None else 0

    def offer(self, update: int) -> dict[int, bytes] | None:
        """Returns by engine rank what it can take instead of all weights; None if the engine needs all."""
        return self._prepared.end.offer(update) if self._prepared is not None else None

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
        return _Prepared(command, published, trainer_end(side, command))
