"""Executes the commands of engines on one trainer rank, until trainer rank 0 reports the results.

Engine ranks that can read this rank's memory do so without a command: then a trainer rank only waits for the results,
unless the update is verified. Commands of several engines are executed at the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from sglang_reshard import tasks
from sglang_reshard.errors import Aborted, Mismatch, ReshardError
from sglang_reshard.landings import responder
from sglang_reshard.landings.base import Responder
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.protocol.messages import (
    EngineCommand,
    Question,
    UpdateResults,
    name_rank,
)
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import EngineScope, TrainerChannel
from sglang_reshard.trainer.engine_transfers import EngineTransfers, Shards
from sglang_reshard.trainer.publisher import PublishedShards

logger = get_logger(__name__)


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
        self._engines: tuple[int, ...] = ()
        self._transfers: dict[int, EngineTransfers] = {}  # of engines that have sent commands
        self._responders: dict[str, Responder] = {}  # of landings that have asked, by their names

    def set_engines(self, engines: Iterable[int]) -> None:
        """Sets the engines of further updates, by their numbers."""
        self._engines = tuple(engines)
        for engine in self._transfers.keys() - set(self._engines):
            self._transfers.pop(engine).release()

    def prepared_transfers(self, published: PublishedShards) -> dict[int, str]:
        """Returns engine -> the transfer that is prepared for these shards."""
        found = {engine: transfers.prepared_transfer(published) for engine, transfers in self._transfers.items()}
        return {engine: transfer for engine, transfer in found.items() if transfer}

    def offers(self, published: PublishedShards, update: int) -> dict[int, dict[int, bytes]]:
        """Returns engine -> engine rank -> what it can take instead of all weights, for engines that can."""
        found = {engine: transfers.offer(published, update) for engine, transfers in self._transfers.items()}
        return {engine: offer for engine, offer in found.items() if offer is not None}

    def run(self, channel: TrainerChannel, published: PublishedShards | None, shards: Shards) -> UpdateResults:
        """Executes commands until the update ends for all engines.

        A failure here aborts the update of the engine whose command it was, and is not raised: the results report it.
        Raises Aborted if no results arrive, and Mismatch if the shards have changed since a landing was answered, where
        peers could write to them.
        """
        commands = _EngineCommands(self._of, channel, published, shards, self._rank)
        results, asked = None, set[str]()
        try:
            with commands:
                for message in channel.messages(self._timeout_s):
                    if isinstance(message, UpdateResults):
                        results = message
                    elif isinstance(message.command, Question):
                        asked.add(message.command.landing)
                        given = functools.partial(_published, published, self._rank)
                        self._responder_to(message.command).answer(channel, message.command, given, shards)
                    elif message.engine in self._engines:  # else it has been left out
                        commands.execute(message, alone=len(self._engines) == 1)
        except BaseException:
            self.release()
            raise
        assert results is not None, "the last message"
        for engine, transfers in self._transfers.items():
            result = results.of.get(engine)
            if result is not None and result.failure is None:
                transfers.commit(channel.update)
            elif engine in commands.called:
                transfers.release()
        for landing in asked:
            writable = any(transfers.writable_bytes for transfers in self._transfers.values())
            self._responders[landing].end(channel.update, writable)
        return results

    def _of(self, engine: int) -> EngineTransfers:
        if engine not in self._transfers:
            self._transfers[engine] = EngineTransfers(
                self._session, engine, self._rank, self._shared, lambda: max(1, len(self._engines))
            )
        return self._transfers[engine]

    def _responder_to(self, question: Question) -> Responder:
        if question.landing not in self._responders:
            made = responder(question.landing, self._session, self._rank, self._size, self._timeout_s)
            self._responders[question.landing] = made
        return self._responders[question.landing]

    def release(self) -> None:
        """Drops connections, buffers, and the views that keep the shards' memory."""
        for one in self._responders.values():
            one.release()
        for transfers in self._transfers.values():
            transfers.release()


class _EngineCommands:
    """Executes the commands of one update: one engine's in order, and those of several engines at the same time.

    called  engines that have sent any
    """

    def __init__(
        self,
        transfers: Callable[[int], EngineTransfers],
        channel: TrainerChannel,
        published: PublishedShards | None,
        shards: Shards,
        trainer_rank: int,
    ) -> None:
        self._transfers_to, self._channel, self._published, self._shards = transfers, channel, published, shards
        self._rank = trainer_rank
        self._transfers: dict[int, EngineTransfers] = {}
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._scopes: dict[int, EngineScope] = {}
        self._stack = ExitStack()

    @property
    def called(self) -> Sequence[int]:
        return tuple(self._scopes)

    def __enter__(self) -> None:
        self._stack.__enter__()

    def __exit__(self, *_: object) -> None:
        """Waits for the commands that are being executed, which the end of an engine's update ends."""
        self._stack.close()

    def execute(self, message: EngineCommand, *, alone: bool) -> None:
        """Executes a command, in this thread if the engine is `alone`, and else in one of the engine's own."""
        engine = message.engine
        if engine not in self._scopes:
            self._transfers[engine] = transfers = self._transfers_to(engine)
            self._scopes[engine] = scope = self._channel.engine(engine)
            scope.on_abort(transfers.abort)
            self._stack.callback(scope.leave)
        if alone:
            self._execute(message)
            return
        if engine not in self._threads:
            self._threads[engine] = ThreadPoolExecutor(1, f"{tasks.PREFIX} engine {engine}")
            self._stack.enter_context(self._threads[engine])
        self._threads[engine].submit(tasks.carried(self._execute), message)

    def _execute(self, message: EngineCommand) -> None:
        scope = self._scopes[message.engine]
        try:
            published = _published(self._published, self._rank)
            self._transfers[message.engine].execute(scope, message.command, published, self._shards)
        except Aborted:
            pass  # the results report it
        except Exception as error:
            if not isinstance(error, ReshardError):
                logger.exception("trainer rank %d failed in update %d", self._rank, scope.update)
            description = str(error) if isinstance(error, ReshardError) else f"{type(error).__name__}: {error}"
            scope.abort_because(error, name_rank(self._rank, description))


def _published(published: PublishedShards | None, trainer_rank: int) -> PublishedShards:
    if published is None:
        raise Mismatch(f"trainer rank {trainer_rank} has published nothing that it could send")
    return published
