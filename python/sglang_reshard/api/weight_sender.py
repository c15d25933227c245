"""What a trainer rank runs.

    sender = WeightSender("http://gpu7:30000", admin_api_key=...)     # on every trainer rank
    report = sender.update(model.named_parameters(), weight_version="42")

A trainer rank hands out its shards by handle, and engine ranks on its host read its memory. To those that
cannot it sends what they ask for, see `outbound`. Its weights must not change until `update` returns.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.control import Address
from sglang_reshard.errors import Aborted, Mismatch, ReshardError, Unsupported
from sglang_reshard.observability import spans
from sglang_reshard.observability.logs import about, configure, get_logger
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.messages import DEFAULT_BUCKET_BYTES, DEFAULT_TIMEOUT_S, Failure, TrainerStatus, Verify
from sglang_reshard.protocol.session import LOOPBACK, Session
from sglang_reshard.protocol.update_channel import UpdateChannel
from sglang_reshard.sources import NamedTensors
from sglang_reshard.trainer.collectives import on_first_rank
from sglang_reshard.trainer.coordinator import Send, SenderConfig, UpdateCoordinator, UpdateOptions
from sglang_reshard.trainer.publisher import PublishedShards, ShardPublisher
from sglang_reshard.trainer.worker import Shards, TrainerWorker
from sglang_reshard.transports.memory import host_identity

logger = get_logger(__name__)


class WeightSender:
    """One trainer rank's end of a session with one engine."""

    def __init__(
        self,
        url: str | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        interface: str | None = None,
        transport: str = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """For a server that runs on its own, on every trainer rank. Collective.

        url, api_key, admin_api_key   of the server, see `RemoteEngine`, also for where they are looked for otherwise
        group        the trainer ranks', with a CPU backend; all ranks when not given
        interface    address of rank 0's host that it listens on, and engine ranks reach it by; when not given, the one
                     from which it reaches the server
        transport    "auto", "ipc", "p2p" or "broadcast", see `plan.choice`
        bucket_bytes size of a bucket; a rank holds at most two
        timeout_s    seconds that any one wait may last

        Raises, on every rank: EngineRefused for a server that does not answer, Unauthorized for a wrong key,
        Unsupported for a server without this package, Mismatch for one with another version of it.
        """
        group = group or dist.group.WORLD
        assert group is not None, "init_process_group has not been called"
        remote, reached = connect_server(group, url, api_key=api_key, admin_api_key=admin_api_key, timeout_s=timeout_s)
        send = remote.update_weights_distributed if remote is not None else None
        self._begin(
            _opened(group, interface or reached, timeout_s), send, SenderConfig(transport, bucket_bytes, timeout_s)
        )

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        send: Send | None,
        *,
        interface: str = LOOPBACK,
        transport: str = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> WeightSender:
        """For an engine that is reached in another way. Collective over `group`, which has a CPU backend.

        send  used on rank 0 of the group; None on the others
        """
        sender = cls.__new__(cls)
        sender._begin(_opened(group, interface, timeout_s), send, SenderConfig(transport, bucket_bytes, timeout_s))
        return sender

    @classmethod
    def within(
        cls,
        session: Session,
        *,
        trainer_rank: int,
        global_ranks: tuple[int, ...],
        send: Send | None,
        transport: str = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> WeightSender:
        """For a session that somebody else has opened.

        global_ranks  the global rank of each trainer rank, to read device meshes by
        send          how rank 0 reaches the engine; None on the others
        """
        sender = cls.__new__(cls)
        place = _Place(session, trainer_rank, global_ranks)
        sender._begin(place, send, SenderConfig(transport, bucket_bytes, timeout_s))
        return sender

    def _begin(self, place: _Place, send: Send | None, way: SenderConfig) -> None:
        session, rank, ranks = place
        if (send is not None) != (rank == 0):
            raise ValueError("trainer rank 0, and only it, sends the request to the engine")
        if way.bucket_bytes < 1 or way.timeout_s <= 0:
            raise ValueError(f"bucket_bytes={way.bucket_bytes} and timeout_s={way.timeout_s} must be positive")
        configure()
        self._session, self._rank, self._global_ranks = session, rank, ranks
        self._lead = UpdateCoordinator(session, ranks, send, way) if send is not None else None
        self._publisher = ShardPublisher(session, rank, ranks)
        self._outbound = TrainerWorker(session, rank, way.timeout_s)
        self._update = 0
        self._alone = threading.Lock()  # held by the thread that updates
        self._talk: UpdateChannel | None = None  # of the update under way
        self._gone = ""  # which trainer rank has gone, so that no update can succeed any more
        session.attend(f"trainer rank {rank}", self._on_gone)

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
            options = UpdateOptions(
                weight_version, flush_cache, abort_all_requests, tuple(ignore), check_finite, verify, staged, let_go
            )
            return self._update_alone(named_tensors, options)
        finally:
            self._alone.release()

    def _update_alone(self, named_tensors: NamedTensors | torch.nn.Module, options: UpdateOptions) -> UpdateReport:
        started = time.perf_counter()
        self._update += 1
        who, session = f"trainer rank {self._rank}", self._session.address.session
        named = {"session": session, "update": self._update, "version": options.weight_version or ""}
        with about(**named, rank=who), self._span("reshard.update", **named) as span:
            with self._session.update(self._update, who) as talk, self._unless_gone(talk):
                published, shards = self._announce(talk, named_tensors, options.check_finite)
                if self._lead is not None:
                    self._lead.begin(talk, published, options, started)
                done = self._outbound.follow(talk, published, shards)
            if done.failure is not None:
                raise done.failure.error()
            report = done.report
            assert report is not None
            spans.tell(span, transport=report.transport, received_bytes=report.received_bytes)
            if self._rank == 0:
                logger.info("update %d: %s", self._update, report.line())
            return report

    def _span(self, name: str, **attributes: Any) -> contextlib.AbstractContextManager[Any]:
        """Trainer rank 0's tell of the whole update: those of the others would be the same, each a trace of its own."""
        return spans.span(name, **attributes) if self._rank == 0 else contextlib.nullcontext()

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
    def _unless_gone(self, talk: UpdateChannel) -> Iterator[None]:
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
        self, talk: UpdateChannel, named_tensors: NamedTensors | torch.nn.Module, check_finite: bool
    ) -> tuple[PublishedShards | None, Shards]:
        """Publish what is new about this rank's shards, and say to rank 0 that it is ready, or why not.

        Returns what is published, and a way to the shards, which are looked up only where they are sent.
        """
        published, failure = None, None
        try:
            named_tensors = _repeatable(named_tensors)
            with self._span("reshard.publish"):
                published = self._publisher.publish(named_tensors, check_finite=check_finite)
        except Exception as error:
            failure = Failure.of(error)
            if not isinstance(error, ReshardError):
                logger.exception("trainer rank %d cannot take part in update %d", self._rank, self._update)
        layout, handles = (published.layout, published.handles) if published else ("", "")
        note = TrainerStatus(host_identity(), layout, handles, failure, self._outbound.standing(published))
        talk.announce(self._rank, note)
        return published, functools.partial(self._publisher.shards, named_tensors)


def connect_server(group: dist.ProcessGroup, url: str | None, **options: Any) -> tuple[RemoteEngine | None, str]:
    """Returns the checked server on the group's first rank (None on others), and the address that it can reach.

    The address is that of the first rank's interface towards the server. Collective; `options` are those of
    `RemoteEngine`. Raises on every rank what `RemoteEngine.check` raises on the first.
    """
    remote: list[RemoteEngine] = []

    def connect() -> str:
        remote.append(RemoteEngine(url, **options))
        remote[0].check()
        return remote[0].local_address()

    address = on_first_rank(connect, group)
    return (remote[0] if remote else None), address


class _Place(NamedTuple):
    """A trainer rank in its session; `ranks` are the global ranks of all."""

    session: Session
    rank: int
    ranks: tuple[int, ...]


def _opened(group: dist.ProcessGroup, interface: str, timeout_s: float) -> _Place:
    """A session of the group's ranks, which its rank 0 hosts on `interface`. Collective."""
    hosted: list[Session] = []

    def host() -> Any:
        try:
            hosted.append(Session.host(interface, timeout_s))
        except OSError as error:
            raise Unsupported(f"interface={interface!r} is no address of trainer rank 0's host: {error}") from error
        return msgspec.to_builtins(hosted[0].address)

    address = msgspec.convert(on_first_rank(host, group), Address)
    session = hosted[0] if hosted else Session.join(address, timeout_s)
    return _Place(session, dist.get_rank(group), tuple(dist.get_process_group_ranks(group)))


def _repeatable(named_tensors: NamedTensors | torch.nn.Module) -> NamedTensors | torch.nn.Module:
    """What can be gone through twice: first for what is published, then for the shards that are sent."""
    return named_tensors if isinstance(named_tensors, (torch.nn.Module, Collection)) else list(named_tensors)
