"""Sends commands, statuses and votes of one update between its ranks, over the session's control server.

Trainer ranks are in one scope of the control server for all engines of the update, and the ranks of each engine in one
within it: if a trainer rank dies, or aborts, the waits of all others end at once with the reason, and if an engine rank
does, those for that engine. A trainer rank says once what all engines need to know of it, and receives one result for
all of them.

Engine ranks write live weights only after a vote that has marked their engine's scope WRITING, and keep the new weights
only after one that has marked it WRITTEN. A rank that gives up an engine's update revokes that scope first: the control
server then says how far it has come, or lets it come no further.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from sglang_reshard.control import ControlClient, Standing, WaitTimedOut
from sglang_reshard.errors import Aborted, DeadlineExceeded, PeerDisconnected, ReshardError
from sglang_reshard.protocol.messages import (
    Command,
    DistributedUpdateWeightsOutput,
    EngineCommand,
    Outcome,
    Question,
    TrainerStatus,
    UpdateResults,
    decode,
    encode,
)

T = TypeVar("T")
_MESSAGE: Any = EngineCommand | UpdateResults  # a union, which is no type[T]
_CAUSE_S = 0.5  # head start of the rank that failed, whose reason explains a connection that broke
ANSWER_S = 5.0  # how long an engine may take to answer an aborted update
_RESULT_S = ANSWER_S + 1.0  # how long its result may take to arrive
_SETTLED_S = 2 * ANSWER_S + 1.0  # how long after an abort: without an answer its ranks have as long to leave
_POLL_S = 0.05
_DOUBT_S = 10.0  # for an engine rank without a connection to find out whether the others write
WRITING, WRITTEN = "writing", "written"  # marks of an engine's scope, see above


class _Scope:
    """One rank's membership in a scope of the control server, in a `with` block."""

    def __init__(self, client: ControlClient, scope: str, owner: str) -> None:
        self._client, self.scope, self._owner = client, scope, owner

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the scope. An exception that leaves the block aborts the update for all that are in it."""
        if error is not None:
            self.abort(f"{self._owner} failed: {type(error).__name__}: {error}")
        self.leave()

    def leave(self) -> None:
        with contextlib.suppress(ReshardError):  # a rank without a connection has left
            self._client.leave(self.scope)

    def abort(self, reason: str, *, wait: bool = True) -> None:
        """Aborts the update for all that are in the scope. The first reason is the one that all of them raise.

        wait  until the server has heard of it
        """
        with contextlib.suppress(ReshardError):  # a lost connection aborts the update, too
            self._client.cancel(self.scope, reason, wait=wait)

    def abort_because(self, error: BaseException, reason: str) -> None:
        """Aborts the update for an error of this rank. A rank that only lost its peer lets the peer report first."""
        if isinstance(error, PeerDisconnected):
            time.sleep(_CAUSE_S)
        self.abort(reason)

    def on_abort(self, callback: Callable[[str], None]) -> None:
        """Calls `callback(reason)` in another thread when the update is aborted, to end other waits."""
        self._client.watch(self.scope, callback)

    def off_abort(self, callback: Callable[[str], None]) -> None:
        """Forgets a callback of `on_abort`, and no other one."""
        self._client.unwatch(self.scope, callback)

    def _get(self, keys: Sequence[str], timeout_s: float, explain: Callable[[list[int]], str]) -> list[bytes]:
        return self._client.get(keys, timeout_s, self.scope, explain)


class TrainerChannel(_Scope):
    """One trainer rank's end: `with session.trainer_channel(7, "trainer rank 3") as channel: ...`"""

    def __init__(self, client: ControlClient, update: int, owner: str) -> None:
        super().__init__(client, update_scope(update), owner)
        self.update = update

    def __enter__(self) -> TrainerChannel:
        """Enters the scope: if another rank has aborted the update already, the first wait raises Aborted."""
        self._client.enter(self.scope, self._owner)
        return self

    def publish_status(self, trainer_rank: int, status: Outcome[TrainerStatus]) -> None:
        self._client.set({f"{self.scope}/status/{trainer_rank}": encode(status)}, wait=False)

    def exchange_layouts(self, trainer_rank: int, trainer_ranks: int, timeout_s: float, own: bytes) -> list[bytes]:
        """Returns what each trainer rank passes, in rank order: what it lists, where ranks list different tensors.

        Raises DeadlineExceeded, naming the ranks that did not call update.
        """
        explain = functools.partial(_no_call, self.update, timeout_s)
        name = f"{self.scope}/layouts"
        return self._client.all_gather(name, trainer_rank, trainer_ranks, own, timeout_s, self.scope, explain=explain)

    def messages(self, timeout_s: float) -> Iterator[EngineCommand | UpdateResults]:
        """Yields the engines' commands in order, up to `UpdateResults`. `timeout_s` bounds each rank's own waits.

        After an abort it waits a few seconds for `UpdateResults` only, which explain the failure best.
        """
        wait_s = 2 * (timeout_s + _RESULT_S)  # engine ranks may wait twice until they give up
        for number in itertools.count():
            try:
                (data,) = self._get([_numbered(self.update, number)], wait_s, lambda _: (
                    f"update {self.update} did not end within {wait_s:.0f} s; look at the logs of trainer rank 0 and "
                    "of the engines"
                ))  # fmt: skip
            except (Aborted, DeadlineExceeded) as error:
                self.abort(str(error))  # so that trainer rank 0 reports what has become of the weights
                yield self._results_after_abort(number, error)
                return
            message: EngineCommand | UpdateResults = decode(data, _MESSAGE)
            yield message
            if isinstance(message, UpdateResults):
                return

    def engine(self, engine: int) -> EngineScope:
        """Returns the scope of one engine; this rank is not a member."""
        return EngineScope(self._client, self.update, engine, self._owner)

    def put_part(self, trainer_rank: int, question: Question, part: Outcome[Any]) -> None:
        """Hands this trainer rank's part of an answer to trainer rank 0."""
        self._client.set({f"{_asked(self.update, question)}/of/{trainer_rank}": encode(part)})

    # -- trainer rank 0

    def collect_statuses(self, ranks: int, timeout_s: float) -> list[Outcome[TrainerStatus]]:
        """Returns all trainer ranks' statuses. Raises DeadlineExceeded naming the ranks that published none."""
        keys = [f"{self.scope}/status/{rank}" for rank in range(ranks)]
        statuses = self._get(keys, timeout_s, functools.partial(_no_call, self.update, timeout_s))
        return [decode(status, Outcome[TrainerStatus]) for status in statuses]

    def collect_parts(
        self, question: Question, kind: type[T], trainer_ranks: int, timeout_s: float
    ) -> list[Outcome[T]]:
        """Returns the parts of all other trainer ranks. Raises DeadlineExceeded naming the ranks that have put none."""
        keys = [f"{_asked(self.update, question)}/of/{rank}" for rank in range(1, trainer_ranks)]
        data = self._get(keys, timeout_s, lambda missing: _no_answer([r + 1 for r in missing], timeout_s))
        return [decode(part, Outcome[kind]) for part in data]  # type: ignore[valid-type]

    def put_answers(self, question: Question, answers: Sequence[Outcome[Any]]) -> None:
        """Answers, by engine rank, all engines that have asked."""
        self._client.set({_answer(self.update, question, e): encode(answer) for e, answer in enumerate(answers)})

    def send_results(self, results: UpdateResults) -> None:
        """Ends the update on all trainer ranks."""
        self._client.append(_commands(self.update), encode(results))

    def why_aborted(self) -> str:
        """Returns why the trainer ranks have aborted the update of all engines; empty if they have not."""
        try:
            self._get((), 0.0, lambda _: "")
        except Aborted as error:
            return str(error)
        return ""

    def end(self) -> None:
        """Ends this update, and all before it, for ever: a late request finds nothing that it could take part in."""
        self._client.end_scope(self.scope)

    def delete_update(self, update: int) -> None:
        """Deletes the messages of an earlier update that every trainer rank has finished."""
        self._client.delete_scope(update_scope(update))

    # -- keys

    def _results_after_abort(self, number: int, error: ReshardError) -> UpdateResults:
        """Skips the commands from `number` on, which are obsolete. Raises `error` if no results follow them."""
        try:
            while True:
                (data,) = self._client.get([_numbered(self.update, number)], _SETTLED_S)
                message = decode(data, _MESSAGE)
                if isinstance(message, UpdateResults):
                    return message
                number += 1
        except WaitTimedOut:
            raise error from None


class EngineScope(_Scope):
    """The scope of one engine, for trainer ranks that send to it."""

    def __init__(self, client: ControlClient, update: int, engine: int, owner: str) -> None:
        super().__init__(client, f"{update_scope(update)}/{engine}", owner)
        self.update, self.engine = update, engine

    def report_ready(self, trainer_rank: int) -> None:
        """Answers `Prepare`."""
        self._client.set({f"{self.scope}/ready/{trainer_rank}": b""}, wait=False)

    def revoke(self, reason: str) -> Standing:
        """Gives up the update of this engine. Returns how far it has come: it comes no further if it has no mark."""
        return self._client.revoke(self.scope, reason)

    def has_written(self) -> bool:
        """Returns whether all engine ranks have written. Otherwise the update comes no further, as after `revoke`."""
        return self.revoke("the engine answered before its ranks had written").mark == WRITTEN

    def until_left(self, timeout_s: float) -> None:
        """Waits until all engine ranks have left a revoked update, and so read none of the trainer's memory."""
        end = time.monotonic() + timeout_s
        while self.revoke("").members and time.monotonic() < end:
            time.sleep(_POLL_S)

    def until_written(self, timeout_s: float) -> Standing:
        """Waits for the end of an update that has the mark WRITING: WRITTEN, or no engine rank is left in it.

        Cancels it at the timeout.
        """
        end = time.monotonic() + timeout_s
        while (standing := self.revoke("")).mark == WRITING and standing.members and not standing.reason:
            if time.monotonic() >= end:
                self.abort(f"the engine did not end update {self.update} within {timeout_s:.0f} s")
            time.sleep(_POLL_S)
        return standing

    def get_outcome(self, timeout_s: float) -> DistributedUpdateWeightsOutput:
        """Returns the outcome of an update that has the mark WRITTEN."""
        (data,) = self._client.get([f"{self.scope}/outcome"], timeout_s)
        return decode(data, DistributedUpdateWeightsOutput)


class EngineChannel(EngineScope):
    """One engine rank's end: `with session.engine_channel(7, 0, "engine rank 3") as channel: ...`"""

    def __enter__(self) -> EngineChannel:
        """Enters the scope within the trainer's: if that has ended, the first wait raises Aborted."""
        self._client.enter(self.scope, self._owner, update_scope(self.update))
        return self

    def put_outcome(self, output: DistributedUpdateWeightsOutput) -> None:
        """Publishes what the outcome is if the vote that follows marks the scope WRITTEN."""
        self._client.set({f"{self.scope}/outcome": encode(output)}, wait=False)

    def standing_without_connection(self) -> Standing | None:
        """Aborts the update over a separate connection: for a rank that has lost this one in a vote.

        Returns how far the update has come, and comes no further: the server may still count with that rank's vote
        otherwise. Returns None if that cannot be found out, as the session has ended or cannot be reached.
        """
        try:
            with ControlClient(self._client.address, _DOUBT_S) as client:
                reason = f"{self._owner} lost its connection to the control server during a vote"
                client.cancel(self.scope, reason)
                return client.revoke(self.scope, reason)
        except ReshardError:
            return None

    def send_command(self, command: Command) -> None:
        """Sends a command to all trainer ranks, after those that were sent before."""
        self._client.append(_commands(self.update), encode(EngineCommand(self.engine, command)))

    def collect_ready(self, ranks: int, timeout_s: float) -> None:
        """Waits until all trainer ranks have reported ready. Raises DeadlineExceeded naming those that have not."""
        self._get([f"{self.scope}/ready/{rank}" for rank in range(ranks)], timeout_s, lambda missing: (
            f"trainer ranks {missing} were not ready to send within {timeout_s:.0f} s; look at their logs"
        ))  # fmt: skip

    def ask(self, question: Question) -> None:
        """Asks all trainer ranks, unless another engine has asked the same."""
        command = encode(EngineCommand(self.engine, question))
        self._client.append(_commands(self.update), command, _asked(self.update, question))

    def answer(self, question: Question, kind: type[T], engine_rank: int, timeout_s: float) -> T:
        """Returns the answer for an engine rank. Raises what a trainer rank raised that could not answer."""
        key = _answer(self.update, question, engine_rank)
        wait_s = timeout_s + _RESULT_S  # trainer rank 0 knows which ranks it waits for
        (data,) = self._get([key], wait_s, lambda _: _no_answer([0], wait_s))
        found: Outcome[T] = decode(data, Outcome[kind])  # type: ignore[valid-type]
        return found.result()

    def all_gather(
        self, phase: str, engine_rank: int, engine_ranks: int, message: T, timeout_s: float, mark: str = ""
    ) -> list[T]:
        """Returns every engine rank's message, in rank order. A rank that failed must still call it, with its error.

        mark  what the engine's scope is marked with if every rank passes it

        Raises, on all ranks, DeadlineExceeded naming the ranks that did not call it, and Aborted. After ConnectionLost
        the other ranks may have got the messages.
        """

        def explain(missing: list[int]) -> str:
            return (
                f"engine ranks {missing} did not reach the end of phase '{phase}' within {timeout_s:.0f} s; look at "
                "their logs"
            )

        name, own = f"{self.scope}/{phase}", encode(message)
        data = self._client.all_gather(name, engine_rank, engine_ranks, own, timeout_s, self.scope, mark, explain)
        return [decode(m, type(message)) for m in data]


def update_scope(update: int) -> str:
    return f"update/{update}"


def _commands(update: int) -> str:
    return f"{update_scope(update)}/commands"


def _numbered(update: int, number: int) -> str:
    return f"{_commands(update)}/{number}"


def _asked(update: int, question: Question) -> str:
    return f"{update_scope(update)}/asked/{hashlib.sha256(encode(question)).hexdigest()[:32]}"


def _answer(update: int, question: Question, engine_rank: int) -> str:
    return f"{_asked(update, question)}/for/{engine_rank}"


def _no_call(update: int, timeout_s: float, missing: list[int]) -> str:
    return (
        f"update {update}: trainer ranks {missing} did not call update within {timeout_s:.0f} s. Every trainer rank "
        "must call it; look at the logs of these ranks"
    )


def _no_answer(missing: list[int], timeout_s: float) -> str:
    return f"trainer ranks {missing} did not answer the engine's question within {timeout_s:.0f} s; look at their logs"
