"""Takes part in one session's updates on one trainer rank: publishes its shards, and sends where it is asked to.

Other modules open the session and bring requests to the engines: `api.weight_sender` and `api.multi_engine` for a
trainer, `extras.replicas.share` for an engine that passes its own weights on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar, cast

import msgspec
import torch

from sglang_reshard import tasks
from sglang_reshard.errors import Aborted, Mismatch, ReshardError
from sglang_reshard.landings import explained
from sglang_reshard.layout.names import is_mapping
from sglang_reshard.memory.mapping import MemoryExporter, host_identity
from sglang_reshard.observability import spans
from sglang_reshard.observability.logs import configure, get_logger, log_context
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.messages import Failure, Outcome, TrainerStatus
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import TrainerChannel
from sglang_reshard.routes import options_around, shared_state
from sglang_reshard.sources import TrainerState
from sglang_reshard.trainer.collectives import Gathering
from sglang_reshard.trainer.coordinator import Send, UpdateCoordinator
from sglang_reshard.trainer.options import SenderOptions, UpdateOptions
from sglang_reshard.trainer.publisher import PublishedShards, ShardPublisher, Weights
from sglang_reshard.trainer.worker import Shards, TrainerWorker

T = TypeVar("T", bound=Weights)
logger = get_logger(__name__)


class UpdateSender:
    """One trainer rank's end of a session with any number of engines. Not for use from several threads at once.

    A trainer rank publishes its shards once for all engines, and waits for one result.

    session    that the trainer ranks meet in
    ranks      the trainer rank, and the global rank of each trainer rank
    timeout_s  seconds that any one wait may last
    """

    def __init__(
        self,
        session: Session,
        rank: int,
        global_ranks: tuple[int, ...],
        options: SenderOptions,
        shared_memory: MemoryExporter | None = None,
    ) -> None:
        """Begins to take part in an open session.

        rank           trainer rank
        global_ranks   the rank of each trainer rank in torch.distributed's world, as device meshes list them
        shared_memory  of several senders, see `ShardPublisher`
        """
        configure()
        self._options, self._may_offer = options, bool(options_around(options))
        self._closed = False
        self.session, self._rank, self._global_ranks = session, rank, global_ranks
        self.ranks, self.timeout_s = (rank, global_ranks), options.timeout_s
        self._host = host_identity()
        self._coordinator = UpdateCoordinator(session, global_ranks, options) if rank == 0 else None
        self._publisher = ShardPublisher(session, rank, global_ranks, shared_memory)
        self._worker = TrainerWorker(session, rank, len(global_ranks), options.timeout_s, shared_state(options))
        self._engines: tuple[int, ...] = ()
        self._update = 0
        self._adapter: str | None = None  # the first one that the last update brought
        self._updating = threading.Lock()
        self._channel: TrainerChannel | None = None  # of the update under way
        self._cancelled = ""  # why the update under way must end
        self._lost_peer = ""  # which trainer rank has died, so that no update can succeed any more
        session.watch_peers(f"trainer rank {rank}", self._on_lost_peer)

    def set_engines(self, engines: Mapping[int, Send | None]) -> None:
        """Sets the engines of further updates, and ends the session for those that are no longer among them.

        Every trainer rank must call it, with the same numbers.

        engines  number in the session, which no other engine has had, -> function that sends a request to the engine
                 and returns its answer, on trainer rank 0; None on the others
        """
        if any((send is not None) != (self._rank == 0) for send in engines.values()):
            raise ValueError("send must be given on trainer rank 0, and must be None on the other trainer ranks")
        self._worker.set_engines(engines)
        if self._coordinator is not None:
            self._coordinator.set_engines({engine: send for engine, send in engines.items() if send is not None})
            for engine in set(self._engines) - engines.keys():
                self.session.end_engine(engine)
        self._engines = tuple(engines)

    def update_engines(self, named_tensors: Weights, options: UpdateOptions) -> dict[int, UpdateReport | ReshardError]:
        """Updates all engines at the same time. Collective; for tensors, options and errors see `WeightSender.update`.

        Returns engine -> its report, or why it was not updated. Raises what concerns all engines, on every trainer
        rank.
        """
        if not self._updating.acquire(blocking=False):
            raise Mismatch(
                f"trainer rank {self._rank}: update {self._update} is running in another thread; wait for it to return"
            )
        try:
            return self._run_update(named_tensors, options)
        finally:
            self._cancelled = ""
            self._updating.release()

    @property
    def last_update(self) -> tuple[str, int, str | None]:
        """The session's name, the number of its last update, and the LoRA adapter that it brought, if it did."""
        return self.session.address.session, self._update, self._adapter

    def agree(self, own: bytes, method: str, timeout_s: float | None = None) -> bytes:
        """Returns what trainer rank 0 passes. Collective.

        method     what the ranks call at the same time, for the name of the exchange and the error
        timeout_s  by default the sender's

        Raises DeadlineExceeded, naming the ranks that do not call it.
        """
        timeout_s = timeout_s or self.timeout_s
        gathered = self.exchange(f"agreed/{method}", own, timeout_s, lambda missing: (
            f"trainer ranks {missing} did not call {method} within {timeout_s:.0f} s. Every trainer rank must call it; "
            "look at the logs of these ranks"
        ))  # fmt: skip
        return gathered[0]

    def exchange(
        self, name: str, own: bytes, timeout_s: float, explain: Callable[[list[int]], str] | None = None
    ) -> list[bytes]:
        """Returns what each trainer rank passes under the same name, in rank order. Collective.

        explain  returns the message of DeadlineExceeded for these missing ranks
        """
        size = len(self._global_ranks)
        return self.session.client.all_gather(name, self._rank, size, own, timeout_s, explain=explain)

    def cancel_update(self, cancelled: bool) -> None:
        """Aborts the update that runs in another thread, on all ranks. Engines that are being written are torn.

        cancelled  False once it has ended: the next one is not cancelled
        """
        self._cancelled = f"trainer rank {self._rank} cancelled the update" if cancelled else ""
        if cancelled and (channel := self._channel) is not None:
            channel.abort(self._cancelled)

    def _run_update(self, named_tensors: Weights, options: UpdateOptions) -> dict[int, UpdateReport | ReshardError]:
        started = time.perf_counter()
        self._update += 1
        self._adapter = options.lora[0].name if options.lora else None
        rank_name, session = f"trainer rank {self._rank}", self.session.address.session
        labels = {"session": session, "update": self._update, "version": options.weight_version or ""}
        with log_context(**labels, rank=rank_name), self._span("reshard.update", **labels) as span:
            with self.session.trainer_channel(self._update, rank_name) as channel, self._unless_peer_lost(channel):
                published, shards = self._publish(channel, named_tensors, options)
                coordinated = None
                if self._coordinator is not None:
                    run = functools.partial(self._coordinator.run, channel, published, options, started)
                    coordinated = tasks.start("coordinator", run)  # this rank executes commands like all others
                results = self._worker.run(channel, published, shards)
                if coordinated is not None:
                    results = coordinated.result()
            outcomes = {engine: results.of[engine].value_or_error() for engine in self._engines}
            if published is not None:
                outcomes |= self._explained(outcomes, published, shards, options)
            if self._rank == 0:
                self._note(outcomes, span)
            return outcomes

    def _explained(
        self,
        outcomes: Mapping[int, UpdateReport | ReshardError],
        published: PublishedShards,
        shards: Shards,
        options: UpdateOptions,
    ) -> Mapping[int, UpdateReport | ReshardError]:
        """Returns the outcomes that the trainer ranks can add to. Collective."""
        errors = {engine: error for engine, error in outcomes.items() if isinstance(error, ReshardError)}
        if errors:
            exchange = functools.partial(self.exchange, f"disagreement/{self._update}", timeout_s=self.timeout_s)
            source = published.source, shards, self._rank
            errors = explained(errors, *source, self._update, exchange, options.partial)
        remarked = {
            engine: msgspec.structs.replace(told, message="; ".join(filter(None, (published.remark, told.message))))
            for engine, told in outcomes.items()
            if published.remark and isinstance(told, UpdateReport)
        }
        return remarked | errors

    def _note(self, outcomes: Mapping[int, UpdateReport | ReshardError], span: Any) -> None:
        """Logs what has succeeded, and adds all outcomes to the update's span."""
        reports = {engine: report for engine, report in outcomes.items() if isinstance(report, UpdateReport)}
        for engine, report in reports.items():
            which = f"update {self._update}" if len(outcomes) == 1 else f"update {self._update}, engine {engine}"
            logger.info("%s: %s", which, report.line())
        if reports:
            transports = ", ".join(sorted({report.transport for report in reports.values()}))
            received_bytes = sum(report.received_bytes for report in reports.values())
            spans.set_attributes(span, transport=transports, received_bytes=received_bytes)
        if failed := [str(error) for error in outcomes.values() if isinstance(error, ReshardError)]:
            spans.set_error(span, failed[0])

    def _span(self, name: str, **attributes: Any) -> contextlib.AbstractContextManager[Any]:
        """Opens a span on trainer rank 0 only; the others would duplicate it, each in a separate trace."""
        return spans.span(name, **attributes) if self._rank == 0 else contextlib.nullcontext()

    def release(self) -> None:
        """Drops views of the shards; call it before weights are offloaded or freed between updates.

        Trainer ranks that send (transport="p2p", or engine ranks on other hosts) keep views of their shards, and so
        their memory, between updates. The next update makes them again. Otherwise it does nothing.
        """
        if not self._updating.acquire(blocking=False):
            raise Mismatch(
                f"trainer rank {self._rank}: update {self._update} is running; call release after it has ended"
            )
        try:
            self._worker.release()
            self._publisher.release()
        finally:
            self._updating.release()

    def close(self) -> None:
        """Ends the session. Collective. Engine ranks unmap the shards' memory."""
        if self._closed:
            return
        self._closed = True
        self._worker.set_engines(())
        self._publisher.close()
        if self._rank == 0:
            self.session.end(len(self._global_ranks))
        else:
            self.session.leave(self._rank)

    @contextlib.contextmanager
    def _unless_peer_lost(self, channel: TrainerChannel) -> Iterator[None]:
        """Aborts the update if a trainer rank has died: it would be waited for until the deadline."""
        self._channel = channel
        try:
            if self._lost_peer or self._cancelled:
                raise Aborted(self._lost_peer or self._cancelled)
            yield
        finally:
            self._channel = None

    def _on_lost_peer(self, reason: str) -> None:
        self._lost_peer = f"{reason}; then make a new WeightSender on every trainer rank"
        if (channel := self._channel) is not None:
            channel.abort(self._lost_peer)

    def _publish(
        self,
        channel: TrainerChannel,
        named_tensors: Weights,
        options: UpdateOptions,
    ) -> tuple[PublishedShards | None, Shards]:
        """Publishes what has changed about this rank's shards, and its status for rank 0.

        Returns what is published, and a function that returns the shards, which is called only if they are sent.
        """
        published = None
        named_tensors = repeatable(named_tensors)
        gathering = None
        if options.partial:
            size, timeout_s = len(self._global_ranks), self.timeout_s
            exchange = functools.partial(channel.exchange_layouts, self._rank, size, timeout_s)
            gathering = Gathering[str](self._rank, str, exchange)
        try:
            with self._span("reshard.publish"):
                published = self._publisher.publish(named_tensors, rename=options.renaming, gathering=gathering)
            prepared, offers = self._worker.prepared_transfers(published), dict[int, dict[int, bytes]]()
            if self._may_offer:
                with self._span("reshard.offer"):
                    offers = self._worker.offers(prepared, self._update)
            hashes, heads = (published.layout, published.handles), self._publisher.heads
            status = Outcome(TrainerStatus(self._host, *hashes, prepared, published.device, offers, heads))
        except Exception as error:
            status = Outcome(None, Failure.on(self._rank, error))
        channel.publish_status(self._rank, status)
        return published, functools.partial(self._publisher.shards, named_tensors)


def repeatable(named_tensors: T) -> T:
    """Returns tensors that can be iterated over twice: to publish them, and to send them.

    If they cannot be listed, iterating over the result raises the error.
    """
    given: Any = named_tensors
    if isinstance(given, (Collection, torch.nn.Module, TrainerState)) or is_mapping(given):
        return cast(T, given)
    try:
        return cast(T, list(given))
    except Exception as error:
        return cast(T, raising(error))


def raising(error: Exception) -> Iterator[Any]:
    """Returns named tensors whose reading fails: in an update, where all trainer ranks learn of it."""
    if not isinstance(error, ReshardError):
        logger.error("the tensors that were passed cannot be read", exc_info=error)
        raise ReshardError(f"{type(error).__name__}: {error}") from error
    raise error
    yield
