"""What a trainer rank runs.

    sender = WeightSender.over(group, send)          # on every trainer rank; `send` is used on rank 0 only
    report = sender.update(model.named_parameters(), weight_version="42")

A trainer rank hands out its shards by handle, and engine ranks on its host read its memory. To those that
cannot it sends what they ask for, see `outbound`. Its weights must not change until `update` returns.
"""

from __future__ import annotations

import functools
import glob
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard.collectives import broadcast_message
from sglang_reshard.errors import EngineRefused, Mismatch, ReshardError, TornWeights
from sglang_reshard.messages import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_TIMEOUT_S,
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    Done,
    Failure,
    TrainerNote,
)
from sglang_reshard.outbound import Outbound, Shards
from sglang_reshard.publisher import Published, Publisher
from sglang_reshard.report import TrainerRankReport, UpdateReport
from sglang_reshard.session import Address, Session
from sglang_reshard.sources import Layout, NamedTensors
from sglang_reshard.sources.difference import first_difference
from sglang_reshard.transports.memory import host_identity
from sglang_reshard.version import __version__

logger = logging.getLogger(__name__)
_LEAVING_S = 10.0  # how long rank 0 waits at the end for ranks that may have died
Send = Callable[[DistributedUpdateWeightsReq], DistributedUpdateWeightsOutput]


@dataclass(frozen=True, slots=True)
class _Options:
    """What one update is asked for; see `WeightSender.update`."""

    weight_version: str | None
    flush_cache: bool
    abort_all_requests: bool
    ignore: tuple[str, ...]
    check_finite: bool
    let_go: bool


class WeightSender:
    """One trainer rank's end of a session with one engine.

    global_ranks  the global rank of each trainer rank, to read device meshes by
    send          how rank 0 reaches the engine; None on the others
    """

    def __init__(
        self,
        session: Session,
        *,
        trainer_rank: int,
        global_ranks: tuple[int, ...],
        send: Send | None,
        transport: str = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if (send is not None) != (trainer_rank == 0):
            raise ValueError("trainer rank 0, and only it, sends the request to the engine")
        if bucket_bytes < 1 or timeout_s <= 0:
            raise ValueError(f"bucket_bytes={bucket_bytes} and timeout_s={timeout_s} must be positive")
        self._session, self._rank, self._global_ranks = session, trainer_rank, global_ranks
        self._send, self._transport = send, transport
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._publisher = Publisher(session, trainer_rank, global_ranks)
        self._outbound = Outbound(session, trainer_rank, timeout_s)
        self._update = 0
        self._alone = threading.Lock()  # held by the thread that updates

    @classmethod
    def over(cls, group: dist.ProcessGroup, send: Send | None, **options: Any) -> WeightSender:
        """A sender on every rank of `group` (a CPU process group of the trainer ranks). Collective.

        options: interface (address that rank 0 listens on, 127.0.0.1), transport ("auto", "ipc", "p2p" or "broadcast",
                 see `plan.choice`), bucket_bytes, timeout_s
        """
        interface = options.pop("interface", "127.0.0.1")
        rank = dist.get_rank(group)
        timeout_s = options.get("timeout_s", DEFAULT_TIMEOUT_S)
        session = Session.host(interface, timeout_s) if rank == 0 else None
        address = broadcast_message(session.address if session else None, Address, group)
        return cls(
            session or Session.join(address, timeout_s),
            trainer_rank=rank,
            global_ranks=tuple(dist.get_process_group_ranks(group)),
            send=send,
            **options,
        )

    def update(
        self,
        named_tensors: NamedTensors | torch.nn.Module,
        *,
        weight_version: str | None = None,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
        ignore: Sequence[str] = (),
        check_finite: bool = False,
        let_go: bool = False,
    ) -> UpdateReport:
        """Bring the engine to these weights. Every trainer rank calls it, with the same names in the same order.

        named_tensors  (name, tensor) pairs, or the module itself, see `sglang_reshard.sources.describe`; nothing is
                       gathered, the shards stay where they are
        weight_version what the engine shall call the weights; None keeps its name
        ignore         names that the engine may have no use for, as patterns of fnmatch ("model.layers.61.*");
                       any other such name is refused, unless it is tied to a tensor that is sent too
        check_finite   look for NaN and infinities in every shard first, and refuse them
        let_go         engine ranks unmap the shards' memory at the end: for a trainer that offloads it now. The next
                       update maps it, and plans, anew. Memory that others have mapped is not free when it is freed

        Raises, on every trainer rank: Unsupported or Mismatch for what cannot be sent, DeadlineExceeded for a
        rank that does not show up, EngineRefused for what the engine says. The old weights keep serving then,
        except after TornWeights, which only a successful update heals.
        """
        if not self._alone.acquire(blocking=False):
            raise Mismatch(
                f"trainer rank {self._rank}: update {self._update} is running in another thread; wait for it to return"
            )
        try:
            options = _Options(weight_version, flush_cache, abort_all_requests, tuple(ignore), check_finite, let_go)
            return self._update_alone(named_tensors, options)
        finally:
            self._alone.release()

    def _update_alone(self, named_tensors: NamedTensors | torch.nn.Module, options: _Options) -> UpdateReport:
        started = time.perf_counter()
        self._update += 1
        published, shards = self._announce(named_tensors, options.check_finite)
        seconds = {"publish": time.perf_counter() - started}
        if self._send is None:
            return _outcome(self._outbound.follow(self._update, published, shards))
        with self._outbound.followed(self._update, published, shards):
            try:
                answer = self._lead(self._send, published, options)
                seconds["total"] = time.perf_counter() - started
                assert published is not None  # an error of this rank's own is among the notes and was raised
                report = _report(answer, published.shard_bytes, options.weight_version, self._bucket_bytes, seconds)
            except BaseException as error:
                self._session.say(self._update, Done(None, Failure.of(error)))
                raise
            self._session.say(self._update, Done(report, None))
        return report

    def release(self) -> None:
        """Let go of the shards' memory; to be called before weights are offloaded or freed between updates.

        What is sent to engine ranks (transport="p2p", or engine ranks on other hosts) is kept ready as views
        of the shards, which keep their memory. The next update makes it ready again. Elsewhere it does nothing.
        """
        if not self._alone.acquire(blocking=False):
            raise Mismatch(f"trainer rank {self._rank}: update {self._update} is running; release after it")
        try:
            self._outbound.drop()
        finally:
            self._alone.release()

    def close(self) -> None:
        """End the session; every rank calls it. Engine ranks let go of the memory that they have mapped."""
        self._outbound.drop()
        self._publisher.close()
        if self._rank == 0:
            self._session.end()
            self._session.await_leaving(len(self._global_ranks), _LEAVING_S)
        else:
            self._session.leave(self._rank)

    def _announce(
        self, named_tensors: NamedTensors | torch.nn.Module, check_finite: bool
    ) -> tuple[Published | None, Shards]:
        """Publish what is new about this rank's shards, and say to rank 0 that it is ready, or why not.

        Returns what is published, and a way to the shards, which are looked up only where they are sent.
        """
        published, failure = None, None
        try:
            named_tensors = _repeatable(named_tensors)
            published = self._publisher.publish(named_tensors, check_finite=check_finite)
        except Exception as error:
            failure = Failure.of(error)
            if not isinstance(error, ReshardError):
                logger.exception("trainer rank %d cannot take part in update %d", self._rank, self._update)
        layout, handles = (published.layout, published.handles) if published else ("", "")
        note = TrainerNote(host_identity(), layout, handles, failure, self._outbound.standing(published))
        self._session.announce(self._update, self._rank, note)
        return published, functools.partial(self._publisher.shards, named_tensors)

    def _lead(self, send: Send, published: Published | None, options: _Options) -> DistributedUpdateWeightsOutput:
        """Trainer rank 0: all ranks ready and agreed? Then one request, which carries metadata only."""
        size = len(self._global_ranks)
        notes = self._session.collect_notes(self._update, size, self._timeout_s)
        if self._update > 1:  # every rank has announced this update, so every rank has read the last one's result
            self._session.forget_update(self._update - 1, size)
        for note in notes:
            if note.failure is not None:
                raise note.failure.error()
        self._check_agreement(notes)
        assert published is not None
        tied = tuple(glob.escape(name) for name in published.tied)
        answer = send(
            DistributedUpdateWeightsReq(
                session=self._session.address.session,
                store_host=self._session.address.host,
                store_port=self._session.address.port,
                update=self._update,
                layout=notes[0].layout,
                handles=tuple(note.handles for note in notes),
                trainer_hosts=tuple(note.host for note in notes),
                routes=tuple(note.route for note in notes),
                weight_version=options.weight_version,
                transport=self._transport,
                bucket_bytes=self._bucket_bytes,
                timeout_s=self._timeout_s,
                flush_cache=options.flush_cache,
                abort_all_requests=options.abort_all_requests,
                ignore=options.ignore + tied,
                let_go=options.let_go,
                package_version=__version__,
            )
        )
        if answer.success:
            return answer
        message = "; ".join([answer.message, *self._session.mishaps(self._update, size)])
        if answer.torn:
            raise TornWeights(f"{message}. The engine's weights are torn: repeat the update before generating")
        raise EngineRefused(message)

    def _check_agreement(self, notes: list[TrainerNote]) -> None:
        for rank, note in enumerate(notes):
            if note.layout == notes[0].layout:
                continue
            mine, other = (
                self._session.get_layout(digest, Layout, self._timeout_s) for digest in (notes[0].layout, note.layout)
            )
            raise Mismatch(first_difference(mine, other, rank))


def _repeatable(named_tensors: NamedTensors | torch.nn.Module) -> NamedTensors | torch.nn.Module:
    """What can be gone through twice: first for what is published, then for the shards that are sent."""
    return named_tensors if isinstance(named_tensors, (torch.nn.Module, Collection)) else list(named_tensors)


def _outcome(done: Done) -> UpdateReport:
    if done.failure is not None:
        raise done.failure.error()
    assert done.report is not None
    return done.report


def _report(
    answer: DistributedUpdateWeightsOutput,
    shard_bytes: Sequence[int],
    weight_version: str | None,
    bucket_bytes: int,
    seconds: dict[str, float],
) -> UpdateReport:
    slowest = dict(seconds)
    for rank in answer.ranks:
        for phase, s in rank.seconds.items():
            slowest[phase] = max(s, slowest.get(phase, 0.0))
    trainers = tuple(
        TrainerRankReport(rank, held, answer.read_bytes.get(rank, 0)) for rank, held in enumerate(shard_bytes)
    )
    return UpdateReport(
        success=True,
        message=answer.message,
        weight_version=weight_version,
        transport=answer.transport,
        transport_reason=answer.transport_reason,
        predicted_seconds=answer.predicted_seconds,
        bucket_bytes=bucket_bytes,
        seconds=slowest,
        engine_ranks=answer.ranks,
        trainer_ranks=trainers,
    )
