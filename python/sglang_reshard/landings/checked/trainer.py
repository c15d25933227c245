"""A trainer rank's side: computes the checksums that engine ranks ask for, of the shards that it has published."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from sglang_reshard.errors import Aborted, Mismatch, ReshardError
from sglang_reshard.landings.checked.messages import ChecksAsk, Checksums, summed
from sglang_reshard.landings.checked.regions import RegionSet, Selection
from sglang_reshard.landings.checked.source import PartialChecksums, SourceChecksums
from sglang_reshard.layout.names import renamed
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.protocol.messages import Failure, Outcome, Question, decode
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import TrainerChannel

if TYPE_CHECKING:
    from sglang_reshard.trainer.publisher import PublishedShards

logger = get_logger(__name__)
# What checksums were computed for: content hashes of the regions of all engine ranks and of names, and
# `PublishedShards.identity`.
_Key = tuple[tuple[str, ...], str, tuple[object, ...]]


class TrainerChecks:
    """Answers on one trainer rank, of `size`. Keeps checksums, and the views that they are of, between updates."""

    def __init__(self, session: Session, trainer_rank: int, size: int, timeout_s: float) -> None:
        self._session, self._rank, self._size, self._timeout_s = session, trainer_rank, size, timeout_s
        self._known: dict[_Key, SourceChecksums] = {}
        self._used: dict[_Key, SourceChecksums] = {}  # in this update
        self._answered: list[tuple[SourceChecksums, Selection, PartialChecksums]] = []

    def answer(
        self,
        channel: TrainerChannel,
        question: Question,
        published: Callable[[], PublishedShards],
        shards: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        """Computes checksums. On trainer rank 0, also those of all trainer ranks together, for the engines."""
        try:
            ask = decode(question.message, ChecksAsk)
            checksums = self._checksums(ask, published(), shards)
            found = checksums.compute(ask.selection)
            self._answered.append((checksums, ask.selection, found))
            part = Outcome(found)
        except Exception as error:
            if not isinstance(error, ReshardError):
                logger.exception(
                    "trainer rank %d failed to compute checksums for update %d", self._rank, channel.update
                )
            part = Outcome(None, Failure.on(self._rank, error))
        with contextlib.suppress(Aborted):  # the results report it
            if self._rank == 0:
                self._answer_all(channel, question, part)
            else:
                channel.put_part(self._rank, question, part)

    def end(self, update: int, writable: bool) -> None:
        """Ends an update that has asked a question. Drops what it has not used, unless it has used nothing.

        writable  peers could write to the shards. Nobody but the trainer does, and not during an update; but a route
                  may register memory so that peers could, and an optimizer step must not use what they have written

        Raises Mismatch if shards that are `writable` are not what they were when their checksums were sent.
        """
        answered, self._answered = self._answered, []
        self._known, self._used = self._used or self._known, {}
        if writable and any(of.compute(selection) != part for of, selection, part in answered):
            raise Mismatch(
                f"the shards of trainer rank {self._rank} changed during update {update}, while peers could write to "
                "them. Do not train on them: load a checkpoint, and look for processes on this network that are not "
                "part of the job. If this rank itself writes to its weights during an update, prevent that"
            )

    def release(self) -> None:
        """Drops the views that keep the shards' memory."""
        self._known, self._used, self._answered = {}, {}, []

    def _answer_all(self, channel: TrainerChannel, question: Question, own: Outcome[PartialChecksums]) -> None:
        """Answers the engines with the sums of all trainer ranks' parts, or with the failure of one."""
        engine_ranks = len(decode(question.message, ChecksAsk).regions)
        try:
            others = channel.collect_parts(question, PartialChecksums, self._size, self._timeout_s)
            answers = [Outcome(sums) for sums in summed([part.result() for part in (own, *others)], engine_ranks)]
        except Aborted:
            raise
        except Exception as error:
            answers = [Outcome[Checksums](failure=Failure.of(error))] * engine_ranks
        channel.put_answers(question, answers)

    def _checksums(
        self, ask: ChecksAsk, published: PublishedShards, shards: Callable[[], Sequence[torch.Tensor]]
    ) -> SourceChecksums:
        key = ask.regions, ask.names, published.identity
        if key not in self._used:
            if key not in self._known:
                self._known[key] = self._compute(ask, published, shards())
            self._used[key] = self._known[key]
        return self._used[key]

    def _compute(self, ask: ChecksAsk, published: PublishedShards, shards: Sequence[torch.Tensor]) -> SourceChecksums:
        regions: dict[str, RegionSet] = {}
        for rank, digest in enumerate(ask.regions):
            if digest not in regions:
                what = f"the regions of engine rank {rank}"
                regions[digest] = self._session.get(digest, RegionSet, what, self._timeout_s)
        source = published.source
        if ask.names:
            what = "the names that the engine's loader reads"
            source = renamed(source, self._session.get(ask.names, tuple[str, ...], what, self._timeout_s))
        return SourceChecksums(source, shards, self._rank, [regions[digest] for digest in ask.regions])
