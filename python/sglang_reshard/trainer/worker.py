"""Executes the commands of engines on one trainer rank, until trainer rank 0 reports the results.

Engine ranks that can read this rank's memory do so without a command: then a trainer rank only waits for the results,
unless the update is verified. Commands of several engines are executed at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

from sglang_reshard import tasks
from sglang_reshard.digest.regions import RegionSet
from sglang_reshard.digest.selection import Selection
from sglang_reshard.digest.source import SourceChecksums
from sglang_reshard.errors import Aborted, Mismatch, ReshardError
from sglang_reshard.layout.names import renamed
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.protocol.messages import (
    ChecksumPart,
    EngineCommand,
    Failure,
    Outcome,
    RequestChecksums,
    UpdateResults,
    name_rank,
)
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import EngineScope, TrainerChannel, checksum_part
from sglang_reshard.trainer.engine_transfers import EngineTransfers, Shards
from sglang_reshard.trainer.publisher import PublishedShards

logger = get_logger(__name__)
# What checksums were computed for: content hashes of the regions of all engine ranks and of names, and
# `PublishedShards.identity`.
_ChecksumKey = tuple[tuple[str, ...], str, tuple[object, ...]]


class _Answer(NamedTuple):
    """The checksums that were sent of a selection of the shards."""

    of: SourceChecksums
    selection: Selection
    part: ChecksumPart


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
        self._regions: dict[str, RegionSet] = {}
        self._checksums: dict[_ChecksumKey, SourceChecksums] = {}
        self._answered: list[_Answer] = []

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
        Raises Aborted if no results arrive, and Mismatch if the shards have changed since their checksums were sent, as
        far as peers could write to them.
        """
        self._answered = []
        commands = _EngineCommands(self._of, channel, published, shards, self._rank)
        self._checksums, known = {}, self._checksums
        results = None
        try:
            with commands:
                for message in channel.messages(self._timeout_s):
                    if isinstance(message, UpdateResults):
                        results = message
                    elif isinstance(message.command, RequestChecksums):
                        self._answer(channel, message.command, published, shards, known)
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
        self._checksums = self._checksums or known
        used = {digest for regions, *_ in self._checksums for digest in regions}
        self._regions = {digest: self._regions[digest] for digest in self._regions.keys() & used}
        self._check_unchanged(channel.update)
        return results

    def _check_unchanged(self, update: int) -> None:
        """Raises Mismatch if this rank's shards are not what they were when their checksums were sent.

        Nobody but the trainer writes to them, and it does not during an update. A route may
        register memory so that peers could: an optimizer step must not use what they have written.
        """
        answered, self._answered = self._answered, []
        if not any(transfers.writable_bytes for transfers in self._transfers.values()):
            return
        if any(checksum_part(of.compute(selection)) != part for of, selection, part in answered):
            raise Mismatch(
                f"the shards of trainer rank {self._rank} have changed during update {update}, while peers could write "
                "to them. Do not train on them: load a checkpoint, and look for processes on its network "
                "that are no part of this job. If this rank itself writes to its weights during an update, let it not"
            )

    def _of(self, engine: int) -> EngineTransfers:
        if engine not in self._transfers:
            self._transfers[engine] = EngineTransfers(self._session, engine, self._rank, self._shared)
        return self._transfers[engine]

    def release(self) -> None:
        """Drops connections, buffers, and the views that keep the shards' memory."""
        self._checksums = {}
        for transfers in self._transfers.values():
            transfers.release()

    def _answer(
        self,
        channel: TrainerChannel,
        command: RequestChecksums,
        published: PublishedShards | None,
        shards: Shards,
        known: dict[_ChecksumKey, SourceChecksums],
    ) -> None:
        """Computes checksums. On trainer rank 0, also those of all trainer ranks together, for the engines."""
        try:
            checksums = self._source_checksums(command, _published(published, self._rank), shards, known)
            found = checksum_part(checksums.compute(command.selection))
            self._answered.append(_Answer(checksums, command.selection, found))
            part = Outcome(found)
        except Exception as error:
            if not isinstance(error, ReshardError):
                logger.exception("trainer rank %d computed no checksums in update %d", self._rank, channel.update)
            part = Outcome(None, Failure.on(self._rank, error))
        with contextlib.suppress(Aborted):  # the results report it
            if self._rank == 0:
                channel.sum_checksums(command, part, self._size, self._timeout_s)
            else:
                channel.put_checksums(self._rank, command, part)

    def _source_checksums(
        self,
        command: RequestChecksums,
        published: PublishedShards,
        shards: Shards,
        known: dict[_ChecksumKey, SourceChecksums],
    ) -> SourceChecksums:
        key = command.regions, command.names, published.identity
        if key not in self._checksums:
            if key not in known:
                for rank, digest in enumerate(command.regions):
                    if digest not in self._regions:
                        what = f"the regions of engine rank {rank}"
                        self._regions[digest] = self._session.get(digest, RegionSet, what, self._timeout_s)
                regions = [self._regions[digest] for digest in command.regions]
                source = published.source
                if command.names:
                    what = "the names that the engine's loader reads"
                    source = renamed(source, self._session.get(command.names, tuple[str, ...], what, self._timeout_s))
                known[key] = SourceChecksums(source, shards(), self._rank, regions)
            self._checksums[key] = known[key]
        return self._checksums[key]


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
