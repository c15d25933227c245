"""What ranks say to the control server in an update for which nothing has changed, recorded from the channels."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from sglang_reshard.control import ControlClient
from sglang_reshard.engine.context import PrepareVote, WrittenVote
from sglang_reshard.landings.checked.messages import ChecksAsk, Checksums, PartialChecksums, summed
from sglang_reshard.landings.checked.regions import Selection, num_groups
from sglang_reshard.observability.report import RankReport, UpdateReport
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    EngineCommand,
    Outcome,
    Question,
    TrainerStatus,
    UpdateResults,
    encode,
)
from sglang_reshard.protocol.update_channel import WRITING, WRITTEN, EngineChannel, TrainerChannel


class Word(NamedTuple):
    """An operation of the control server. `posted`: nobody waits for it."""

    operation: str
    arguments: tuple[Any, ...]
    posted: bool = False


Words = list[Word]
TIMEOUT_S = 60.0
_TENSORS = 1000
_READ = dict.fromkeys(range(8), 1 << 30)  # trainer rank -> bytes that an engine rank reads
_DIGEST = "0123456789abcdef" * 4
_STATUS = Outcome(TrainerStatus("c0ffee" * 8, _DIGEST, _DIGEST))
_PHASES = ("prepare", "move", "verify", "commit")


class _Recorder(ControlClient):
    """Writes down what it is asked to send. `answers`: what `get` returns, one after another."""

    def __init__(self, answers: list[list[bytes]]) -> None:
        self.words: Words = []
        self._answers = answers
        self._state, self._callbacks, self._lost, self._closed = threading.Lock(), {}, None, False

    def _call(self, operation: str, *arguments: Any, wait: bool = True, **_: Any) -> Any:
        self.words.append(Word(operation, arguments, posted=not wait))
        if not wait:
            return None
        if operation == "get":
            return self._answers.pop(0)
        if operation == "revoke":
            return WRITTEN.encode(), b"", 0
        return [arguments[3]] * arguments[2] if operation == "all_gather" else None


def trainer_rank(update: int, rank: int, ranks: int, engine_ranks: int, verify: bool) -> Words:
    """What a trainer rank says, from the beginning of the update to its end; each answer comes when it is there."""
    request = _request(engine_ranks)
    answers = [[encode(UpdateResults({}))]]
    if verify:
        answers = [
            [encode(EngineCommand(0, request))],
            *([_parts(engine_ranks, ranks - 1)] if not rank else []),
            *answers,
        ]
    recorder = _Recorder(answers)
    with TrainerChannel(recorder, update, f"trainer rank {rank} (host worker-17, process 4242)") as channel:
        channel.publish_status(rank, _STATUS)
        for message in channel.messages(TIMEOUT_S):
            if isinstance(message, EngineCommand) and rank:
                channel.put_part(rank, request, Outcome(_part(engine_ranks)))
            elif isinstance(message, EngineCommand):
                others = channel.collect_parts(request, PartialChecksums, ranks, TIMEOUT_S)
                parts = [_part(engine_ranks), *(part.result() for part in others)]
                channel.put_answers(request, [Outcome(sums) for sums in summed(parts, engine_ranks)])
    return recorder.words


def asking(update: int, ranks: int, engines: int) -> Words:
    """What trainer rank 0 says until it has asked engines for an update."""
    recorder = _Recorder([[encode(_STATUS)] * ranks])
    channel = TrainerChannel(recorder, update, "trainer rank 0")
    channel.collect_statuses(ranks, TIMEOUT_S)
    channel.delete_update(update - 1)
    for engine in range(engines):
        channel.engine(engine).on_abort(lambda _: None)
    return recorder.words


def reporting(update: int, engines: int, engine_ranks: int) -> Words:
    """What trainer rank 0 says when all engines have answered."""
    recorder = _Recorder([])
    results = UpdateResults(dict.fromkeys(range(engines), Outcome(_report(engine_ranks))))
    channel = TrainerChannel(recorder, update, "trainer rank 0")
    for engine in range(engines):
        channel.engine(engine).revoke("")
    channel.end()
    channel.send_results(results)
    return recorder.words


def engine_rank(update: int, engine: int, rank: int, ranks: int, verify: bool) -> Words:
    """What an engine rank says from the request to the answer."""
    recorder = _Recorder([[encode(Outcome(Checksums(bytes(8 * num_groups(_TENSORS)), _DIGEST[:16])))]])
    with EngineChannel(recorder, update, engine, f"engine rank {rank} (host worker-91, process 4242)") as channel:
        channel.on_abort(lambda _: None)
        channel.all_gather("prepare", rank, ranks, PrepareVote(reusable=True), TIMEOUT_S, WRITING)
        if verify:
            if rank == 0:
                channel.ask(_request(ranks))
            channel.answer(_request(ranks), Checksums, rank, TIMEOUT_S)
        vote = WrittenVote(report=_rank_report(rank))
        if rank == 0:
            channel.put_outcome(_output(vote))
        channel.all_gather("commit", rank, ranks, vote, TIMEOUT_S, WRITTEN)
    return recorder.words


def _request(engine_ranks: int) -> Question:
    return Question(encode(ChecksAsk((_DIGEST,) * engine_ranks, Selection.full())))


def _parts(engine_ranks: int, ranks: int) -> list[bytes]:
    return [encode(Outcome(_part(engine_ranks)))] * ranks


def _part(engine_ranks: int) -> PartialChecksums:
    return PartialChecksums(bytes(8 * engine_ranks * num_groups(_TENSORS)), 1)


def _rank_report(rank: int) -> RankReport:
    return RankReport(rank, 1 << 34, 1 << 34, 1 << 27, dict.fromkeys(_PHASES, 0.123456789), read_bytes=_READ)


def _output(vote: WrittenVote) -> DistributedUpdateWeightsOutput:
    assert vote.report is not None
    return DistributedUpdateWeightsOutput(
        success=True,
        message="",
        transport="nixl",
        transport_reason="requested",
        tensors=_TENSORS,
        ranks=(vote.report,),
    )


def _report(engine_ranks: int) -> UpdateReport:
    return UpdateReport(
        success=True,
        message="",
        weight_version="1234",
        transport="nixl",
        transport_reason="requested",
        bucket_bytes=1 << 26,
        seconds=dict.fromkeys((*_PHASES, "publish", "total"), 0.123456789),
        engine_ranks=tuple(_rank_report(rank) for rank in range(engine_ranks)),
        trainer_ranks=(),
    )
