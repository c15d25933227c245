"""Sends commands, statuses and votes of one update between its ranks, over the session's control server.

Every participating rank has entered the update's scope on the control server: if a process in it dies, or aborts,
the waits of all others end at once with the reason.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from sglang_reshard.control import ControlClient, WaitTimedOut
from sglang_reshard.digest import whole_model
from sglang_reshard.digest.source import PartialChecksums
from sglang_reshard.errors import Aborted, DeadlineExceeded, ReshardError
from sglang_reshard.protocol.messages import Command, ListedTensors, TrainerStatus, UpdateResult, decode, encode
from sglang_reshard.transports.abortable_group import PeerDisconnected

T = TypeVar("T")
_COMMAND: Any = Command  # a union, which is no type[T]
_CAUSE_S = 0.5  # head start of the rank that failed, whose reason explains a connection that broke
_RESULT_S = 5.0  # how long an aborted update may take to report its result


class UpdateChannel:
    """One rank's end: `with session.update_channel(7, "engine rank 3") as channel: ...`"""

    def __init__(self, client: ControlClient, update: int, owner: str) -> None:
        self._client, self.update, self._owner = client, update, owner
        self.scope = f"update/{update}"

    def __enter__(self) -> UpdateChannel:
        """Raises Aborted if another rank has already aborted the update."""
        self._client.enter(self.scope, self._owner)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the scope. An exception that leaves the block aborts the update on all ranks."""
        if error is not None:
            self.abort(f"{self._owner} failed: {type(error).__name__}: {error}")
        with contextlib.suppress(ReshardError):  # a rank without a connection has left
            self._client.leave(self.scope)

    def abort(self, reason: str) -> None:
        """Aborts the update on all ranks. The first reason is the one that all of them raise."""
        with contextlib.suppress(ReshardError):  # a lost connection aborts the update, too
            self._client.cancel(self.scope, reason)

    def abort_because(self, error: BaseException, reason: str) -> None:
        """Aborts the update for an error of this rank. A rank that only lost its peer lets the peer report first."""
        if isinstance(error, PeerDisconnected):
            time.sleep(_CAUSE_S)
        self.abort(reason)

    def on_abort(self, callback: Callable[[str], None]) -> None:
        """Calls `callback(reason)` in another thread when the update is aborted, to end other waits."""
        self._client.watch(self.scope, callback)

    # -- trainer ranks

    def publish_status(self, trainer_rank: int, status: TrainerStatus) -> None:
        self._client.set({self._status(trainer_rank): encode(status)})

    def exchange_layouts(
        self, trainer_rank: int, trainer_ranks: int, own: ListedTensors, timeout_s: float
    ) -> list[str]:
        """Returns the content hash of what each trainer rank lists, in rank order.

        Raises, on all ranks, the first rank's failure; DeadlineExceeded naming the ranks that did not call update.
        """
        try:
            data = self._client.all_gather(
                f"{self.scope}/layouts", trainer_rank, trainer_ranks, encode(own), timeout_s, self.scope
            )
        except WaitTimedOut as error:
            raise DeadlineExceeded(_no_call(self.update, list(error.missing), timeout_s)) from None
        listed = [decode(d, ListedTensors) for d in data]
        for other in listed:
            if other.failure is not None:
                raise other.failure.error()
        return [other.layout for other in listed]

    def commands(self, timeout_s: float) -> Iterator[Command]:
        """Yields the commands to trainer ranks in order, up to `UpdateResult`. `timeout_s` bounds each wait.

        After an abort it waits a few seconds for `UpdateResult` only, which explains the failure best.
        """
        for number in itertools.count():
            try:
                (data,) = self._get([self._command(number)], timeout_s, lambda _: (
                    f"update {self.update} did not end: trainer rank 0 reported nothing for {timeout_s:.0f} s; look at "
                    "its log"
                ))  # fmt: skip
            except Aborted as error:
                yield self._result_after_abort(number, error)
                return
            command: Command = decode(data, _COMMAND)
            yield command
            if isinstance(command, UpdateResult):
                return

    def report_ready(self, trainer_rank: int) -> None:
        """Answers `PrepareSend`."""
        self._client.set({self._ready(trainer_rank): b""})

    def put_checksums(self, trainer_rank: int, part: PartialChecksums) -> None:
        """Answers `RequestChecksums` with this trainer rank's part of the engine ranks' checksums and the model's."""
        rows = part.engine_ranks.astype("<u8", copy=False)
        items = {self._checksums(e, trainer_rank): row.tobytes() for e, row in enumerate(rows)}
        self._client.set({**items, self._model_checksum(trainer_rank): whole_model.to_bytes(part.model)})

    # -- trainer rank 0

    def collect_statuses(self, ranks: int, timeout_s: float) -> list[TrainerStatus]:
        """Returns all trainer ranks' statuses. Raises DeadlineExceeded naming the ranks that published none."""
        keys = [self._status(rank) for rank in range(ranks)]
        statuses = self._get(keys, timeout_s, lambda missing: _no_call(self.update, missing, timeout_s))
        return [decode(status, TrainerStatus) for status in statuses]

    def delete_update(self, update: int, ranks: int, engine_ranks: int) -> None:
        """Deletes the messages of an earlier update that every trainer rank has finished."""
        past = UpdateChannel(self._client, update, self._owner)
        commands = self._client.add(past._commands, 0)
        keys = [past._command(number) for number in range(commands)] + [past._commands]
        keys += [key(rank) for rank in range(ranks) for key in (past._status, past._ready, past._model_checksum)]
        keys += [past._checksums(e, t) for e in range(engine_ranks) for t in range(ranks)]
        self._client.delete_keys(keys)
        self._client.delete_scope(past.scope)

    # -- engine ranks

    def send_command(self, command: Command) -> None:
        """Sends a command to all trainer ranks, after those that were sent before."""
        self._client.append(self._commands, encode(command))

    def collect_ready(self, ranks: int, timeout_s: float) -> None:
        """Waits until all trainer ranks have reported ready. Raises DeadlineExceeded naming those that have not."""
        self._get([self._ready(rank) for rank in range(ranks)], timeout_s, lambda missing: (
            f"trainer ranks {missing} were not ready to send within {timeout_s:.0f} s; look at their logs"
        ))  # fmt: skip

    def get_checksums(self, engine_rank: int, trainer_ranks: int, timeout_s: float) -> np.ndarray:
        """Returns the checksums that the trainer's weights give an engine rank: uint64, [groups]."""
        keys = [self._checksums(engine_rank, t) for t in range(trainer_ranks)]
        rows = self._get(keys, timeout_s, lambda missing: _no_checksums(missing, timeout_s))
        parts = np.stack([np.frombuffer(row, "<u8").astype(np.uint64) for row in rows])
        return np.add.reduce(parts, axis=0)

    def get_model_digest(self, trainer_ranks: int, timeout_s: float) -> str:
        """Returns the digest of all weights, see `digest.whole_model`; empty if they have none."""
        keys = [self._model_checksum(t) for t in range(trainer_ranks)]
        return whole_model.model_digest(self._get(keys, timeout_s, lambda missing: _no_checksums(missing, timeout_s)))

    def all_gather(self, phase: str, engine_rank: int, engine_ranks: int, message: T, timeout_s: float) -> list[T]:
        """Returns every engine rank's message, in rank order. A rank that failed must still call it, with its error.

        Raises, on all ranks, DeadlineExceeded naming the ranks that did not call it, and Aborted. After ConnectionLost
        the other ranks may have got the messages.
        """
        try:
            data = self._client.all_gather(
                f"{self.scope}/{phase}", engine_rank, engine_ranks, encode(message), timeout_s, self.scope
            )
        except WaitTimedOut as error:
            raise DeadlineExceeded(
                f"engine ranks {list(error.missing)} did not reach the end of phase '{phase}' within "
                f"{timeout_s:.0f} s; look at their logs"
            ) from None
        return [decode(m, type(message)) for m in data]

    # -- keys

    def _get(self, keys: Sequence[str], timeout_s: float, explain: Callable[[list[int]], str]) -> list[bytes]:
        """`explain` makes the message of DeadlineExceeded from the indices of the missing keys."""
        try:
            return self._client.get(keys, timeout_s, self.scope)
        except WaitTimedOut as error:
            raise DeadlineExceeded(explain(list(error.missing))) from None

    def _result_after_abort(self, number: int, error: Aborted) -> UpdateResult:
        """Skips the commands from `number` on, which are obsolete. Raises `error` if no result follows them."""
        try:
            while True:
                (data,) = self._client.get([self._command(number)], _RESULT_S)
                command = decode(data, _COMMAND)
                if isinstance(command, UpdateResult):
                    return command
                number += 1
        except WaitTimedOut:
            raise error from None

    @property
    def _commands(self) -> str:
        return f"commands/{self.update}"

    def _command(self, number: int) -> str:
        return f"{self._commands}/{number}"

    def _status(self, trainer_rank: int) -> str:
        return f"status/{self.update}/{trainer_rank}"

    def _ready(self, trainer_rank: int) -> str:
        return f"ready/{self.update}/{trainer_rank}"

    def _model_checksum(self, trainer_rank: int) -> str:
        return f"model_checksum/{self.update}/{trainer_rank}"

    def _checksums(self, engine_rank: int, trainer_rank: int) -> str:
        return f"checksums/{self.update}/{engine_rank}/{trainer_rank}"


def _no_call(update: int, missing: list[int], timeout_s: float) -> str:
    return (
        f"update {update}: trainer ranks {missing} did not call update within {timeout_s:.0f} s; every trainer rank "
        "must call it, look at their logs"
    )


def _no_checksums(missing: list[int], timeout_s: float) -> str:
    return f"trainer ranks {missing} did not compute checksums within {timeout_s:.0f} s; look at their logs"
