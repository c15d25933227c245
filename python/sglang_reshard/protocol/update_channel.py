"""What is said in one update, between all ranks of both sides, over the session's hub.

Whoever takes part has entered the update's scope: a process that dies there, or a rank that gives up,
ends the waits of all others at once, with the reason.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

import msgspec
import numpy as np

from sglang_reshard.control import ControlClient, WaitTimedOut
from sglang_reshard.digest import whole_model
from sglang_reshard.digest.source import PartialChecksums
from sglang_reshard.errors import Aborted, DeadlineExceeded, ReshardError
from sglang_reshard.protocol.messages import Command, TrainerStatus, UpdateResult, decode, encode
from sglang_reshard.transports.abortable_group import PeerDisconnected

T = TypeVar("T")
_CAUSE_S = 0.5  # for the rank that failed, or the news that it has gone
_ENDING_S = 5.0  # how long an update that was given up may take to say how it ended


class _Said(msgspec.Struct, frozen=True, array_like=True):
    word: Command


class UpdateChannel:
    """One rank's part in one update: `with session.update(7, "engine rank 3") as talk: ...`"""

    def __init__(self, line: ControlClient, update: int, who: str) -> None:
        self._line, self.update, self._who = line, update, who
        self.scope = f"update/{update}"

    def __enter__(self) -> UpdateChannel:
        """Raises Aborted where another rank has given the update up already."""
        self._line.enter(self.scope, self._who)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """An error that gets out of the block gives the update up on all ranks."""
        if error is not None:
            self.abort(f"{self._who} failed: {type(error).__name__}: {error}")
        with contextlib.suppress(ReshardError):  # who cannot say that it leaves has left
            self._line.leave(self.scope)

    def abort(self, reason: str) -> None:
        """Give the update up on all ranks. The first reason that is given is the one that all of them see."""
        with contextlib.suppress(ReshardError):  # who cannot say it has gone, which is noticed
            self._line.abort(self.scope, reason)

    def fail(self, error: BaseException, reason: str) -> None:
        """Give the update up on all ranks for an error of this one's. The cause of a broken connection speaks first."""
        if isinstance(error, PeerDisconnected):
            time.sleep(_CAUSE_S)
        self.abort(reason)

    def watch(self, then: Callable[[str], None]) -> None:
        """Call `then(reason)` in another thread when the update is given up: to break waits that are not the hub's."""
        self._line.watch(self.scope, then)

    # -- trainer ranks

    def announce(self, trainer_rank: int, note: TrainerStatus) -> None:
        self._line.set({self._note(trainer_rank): encode(note)})

    def collect_notes(self, ranks: int, timeout_s: float) -> list[TrainerStatus]:
        """All trainer ranks' notes. Raises DeadlineExceeded naming the ranks that did not announce themselves."""
        notes = self._get([self._note(rank) for rank in range(ranks)], timeout_s, lambda late: (
            f"update {self.update}: trainer ranks {late} did not call update within {timeout_s:.0f} s; "
            "every trainer rank must call it, look at their logs"
        ))  # fmt: skip
        return [decode(note, TrainerStatus) for note in notes]

    def words(self, timeout_s: float) -> Iterator[Command]:
        """What is said to trainer ranks, in order; `UpdateResult` is the last. `timeout_s` bounds each wait.

        After an abort only `UpdateResult` is waited for, for a few seconds: it tells best what happened.
        """
        for number in itertools.count():
            try:
                (data,) = self._get([f"{self._words}/{number}"], timeout_s, lambda _: self._no_end(timeout_s))
            except Aborted as error:
                yield self._last(number, error)
                return
            word = decode(data, _Said).word
            yield word
            if isinstance(word, UpdateResult):
                return

    def ready(self, trainer_rank: int) -> None:
        """A trainer rank's answer to `Connect`."""
        self._line.set({self._ready(trainer_rank): b""})

    def vouch(self, trainer_rank: int, part: PartialChecksums) -> None:
        """Answers `RequestChecksums` with this trainer rank's part of each engine rank's digests and of the model's."""
        rows = part.digests.astype("<u8", copy=False)
        said = {self._vouched(e, trainer_rank): row.tobytes() for e, row in enumerate(rows)}
        self._line.set({**said, self._whole(trainer_rank): whole_model.packed(part.whole)})

    # -- trainer rank 0

    def forget(self, update: int, ranks: int, engine_ranks: int) -> None:
        """Drop what was said in an earlier update that every trainer rank has finished."""
        past = UpdateChannel(self._line, update, self._who)
        words = self._line.add(past._words, 0)
        keys = [f"{past._words}/{n}" for n in range(words)] + [past._words]
        keys += [key(rank) for rank in range(ranks) for key in (past._note, past._ready, past._whole)]
        keys += [past._vouched(e, t) for e in range(engine_ranks) for t in range(ranks)]
        self._line.delete(keys)
        self._line.forget(past.scope)

    # -- engine ranks

    def say(self, word: Command) -> None:
        """Put a word to all trainer ranks, after those that were said before."""
        self._line.append(self._words, encode(_Said(word)))

    def collect_ready(self, ranks: int, timeout_s: float) -> None:
        """Wait for all trainer ranks' answers. Raises DeadlineExceeded naming who is late."""
        self._get([self._ready(rank) for rank in range(ranks)], timeout_s, lambda late: (
            f"trainer ranks {late} were not ready to send within {timeout_s:.0f} s; look at their logs"
        ))  # fmt: skip

    def vouched(self, engine_rank: int, trainer_ranks: int, timeout_s: float) -> np.ndarray:
        """What the trainer's weights say an engine rank's digests must be: uint64, [groups]."""
        rows = self._get([self._vouched(engine_rank, t) for t in range(trainer_ranks)], timeout_s, lambda late: (
            f"trainer ranks {late} did not vouch for their shards within {timeout_s:.0f} s; look at their logs"
        ))  # fmt: skip
        parts = np.stack([np.frombuffer(row, "<u8").astype(np.uint64) for row in rows])
        return np.add.reduce(parts, axis=0)

    def whole_digest(self, trainer_ranks: int, timeout_s: float) -> str:
        """Of the weights that have been vouched for, see `digest.whole`; empty if they have none."""
        return whole_model.digest_of(self._get([self._whole(t) for t in range(trainer_ranks)], timeout_s, lambda late: (
            f"trainer ranks {late} did not vouch for their shards within {timeout_s:.0f} s; look at their logs"
        )))  # fmt: skip

    def gather(self, phase: str, engine_rank: int, engine_ranks: int, message: T, timeout_s: float) -> list[T]:
        """Every engine rank's message, in rank order.

        A rank that fails must still come here and say so. Raises DeadlineExceeded naming who did not come, on all
        ranks, Aborted, and ConnectionLost; only after the last can others have gone on.
        """
        try:
            said = self._line.gather(
                f"{self.scope}/{phase}", engine_rank, engine_ranks, encode(message), timeout_s, self.scope
            )
        except WaitTimedOut as late:
            raise DeadlineExceeded(
                f"engine ranks {list(late.missing)} did not come to the end of '{phase}' within {timeout_s:.0f} s; "
                "are they stuck? Look at their logs"
            ) from None
        return [decode(m, type(message)) for m in said]

    # -- keys

    def _get(self, keys: Sequence[str], timeout_s: float, late: Callable[[list[int]], str]) -> list[bytes]:
        try:
            return self._line.get(keys, timeout_s, self.scope)
        except WaitTimedOut as error:
            raise DeadlineExceeded(late(list(error.missing))) from None

    def _last(self, number: int, error: Aborted) -> UpdateResult:
        """`UpdateResult`, if it is still said; words before it are for nobody now."""
        try:
            while True:
                (data,) = self._line.get([f"{self._words}/{number}"], _ENDING_S)
                word = decode(data, _Said).word
                if isinstance(word, UpdateResult):
                    return word
                number += 1
        except WaitTimedOut:
            raise error from None

    def _no_end(self, timeout_s: float) -> str:
        return f"update {self.update} did not end: nothing was heard of trainer rank 0 for {timeout_s:.0f} s"

    @property
    def _words(self) -> str:
        return f"words/{self.update}"

    def _note(self, trainer_rank: int) -> str:
        return f"note/{self.update}/{trainer_rank}"

    def _ready(self, trainer_rank: int) -> str:
        return f"ready/{self.update}/{trainer_rank}"

    def _whole(self, trainer_rank: int) -> str:
        return f"whole/{self.update}/{trainer_rank}"

    def _vouched(self, engine_rank: int, trainer_rank: int) -> str:
        return f"vouched/{self.update}/{engine_rank}/{trainer_rank}"
