"""What a trainer rank runs.

    sender = WeightSender.over(group, send)          # on every trainer rank; `send` is used on rank 0 only
    report = sender.update(model.named_parameters(), weight_version="42")

A trainer rank hands out its shards by handle, and engine ranks on its host read its memory. To those that
cannot it sends what they ask for, see `outbound`. Its weights must not change until `update` returns.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard.channel import Address
from sglang_reshard.collectives import broadcast_message
from sglang_reshard.errors import Aborted, Mismatch, ReshardError
from sglang_reshard.lead import Lead, Options, Send, Way
from sglang_reshard.messages import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_TIMEOUT_S,
    Failure,
    TrainerNote,
    Verify,
)
from sglang_reshard.outbound import Outbound, Shards
from sglang_reshard.publisher import Published, Publisher
from sglang_reshard.report import UpdateReport
from sglang_reshard.session import Session
from sglang_reshard.sources import NamedTensors
from sglang_reshard.talk import Talk
from sglang_reshard.transports.memory import host_identity

logger = logging.getLogger(__name__)


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
        way = Way(transport, bucket_bytes, timeout_s)
        self._lead = Lead(session, global_ranks, send, way) if send is not None else None
        self._publisher = Publisher(session, trainer_rank, global_ranks)
        self._outbound = Outbound(session, trainer_rank, timeout_s)
        self._update = 0
        self._alone = threading.Lock()  # held by the thread that updates
        self._talk: Talk | None = None  # of the update under way
        self._gone = ""  # which trainer rank has gone, so that no update can succeed any more
        session.attend(f"trainer rank {trainer_rank}", self._on_gone)

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
        verify: Verify = "off",
        staged: bool = False,
        let_go: bool = False,
    ) -> UpdateReport:
        """Bring the engine to these weights. Every trainer rank calls it, with the same names in the same order.

        named_tensors  (name, tensor) pairs, or the module itself, see `sglang_reshard.sources.describe`; nothing is
                       gathered, the shards stay where they are
        weight_version what the engine shall call the weights; None keeps its name
        ignore         names that the engine may have no use for, as patterns of fnmatch ("model.layers.61.*");
                       any other such name is refused, unless it is tied to a tensor that is sent too
        check_finite   look for NaN and infinities in every shard first, and refuse them
        verify         compare what has arrived with what was sent, by digests, before it counts: "full" looks at every
                       element, "sample" at one row in 64, others in each update. Both sides read that much once more
        staged         engine ranks keep the new weights beside the old ones until all have arrived and are verified: a
                       failure before that leaves the old ones serving. Takes as much memory again as the weights
        let_go         engine ranks unmap the shards' memory at the end: for a trainer that offloads it now. The next
                       update maps it, and plans, anew. Memory that others have mapped is not free when it is freed

        Raises, on every trainer rank: Unsupported or Mismatch for what cannot be sent, DeadlineExceeded for a
        rank that does not show up, EngineRefused for what the engine says. The old weights keep serving then,
        except after TornWeights, which only a successful update heals. Aborted or ConnectionLost where a rank has gone
        and the engine did not say how it stands; it refuses to generate then if its weights are torn.
        """
        if not self._alone.acquire(blocking=False):
            raise Mismatch(
                f"trainer rank {self._rank}: update {self._update} is running in another thread; wait for it to return"
            )
        try:
            options = Options(
                weight_version, flush_cache, abort_all_requests, tuple(ignore), check_finite, verify, staged, let_go
            )
            return self._update_alone(named_tensors, options)
        finally:
            self._alone.release()

    def _update_alone(self, named_tensors: NamedTensors | torch.nn.Module, options: Options) -> UpdateReport:
        started = time.perf_counter()
        self._update += 1
        with self._session.update(self._update, f"trainer rank {self._rank}") as talk, self._unless_gone(talk):
            published, shards = self._announce(talk, named_tensors, options.check_finite)
            if self._lead is not None:
                self._lead.begin(talk, published, options, started)
            done = self._outbound.follow(talk, published, shards)
        if done.failure is not None:
            raise done.failure.error()
        assert done.report is not None
        return done.report

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
            self._session.end(len(self._global_ranks))
        else:
            self._session.leave(self._rank)

    @contextlib.contextmanager
    def _unless_gone(self, talk: Talk) -> Iterator[None]:
        """An update that can still succeed: one that waits for a rank which died before it would wait in vain."""
        self._talk = talk
        try:
            if self._gone:
                raise Aborted(self._gone)
            yield
        finally:
            self._talk = None

    def _on_gone(self, reason: str) -> None:
        self._gone = f"{reason}; then make a new WeightSender on every trainer rank"
        if (talk := self._talk) is not None:
            talk.abort(self._gone)

    def _announce(
        self, talk: Talk, named_tensors: NamedTensors | torch.nn.Module, check_finite: bool
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
        talk.announce(self._rank, note)
        return published, functools.partial(self._publisher.shards, named_tensors)


def _repeatable(named_tensors: NamedTensors | torch.nn.Module) -> NamedTensors | torch.nn.Module:
    """What can be gone through twice: first for what is published, then for the shards that are sent."""
    return named_tensors if isinstance(named_tensors, (torch.nn.Module, Collection)) else list(named_tensors)
