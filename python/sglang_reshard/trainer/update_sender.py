"""Takes part in one session's updates on one trainer rank: publishes its shards, and sends where it is asked to.

Who opens the session, and how requests reach the engine, is others' concern: `api.weight_sender` for a trainer,
`replicas.share` for an engine that passes its own weights on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from sglang_reshard._deprecated import renamed_keywords
from sglang_reshard.errors import Aborted, Mismatch, ReshardError
from sglang_reshard.observability import spans
from sglang_reshard.observability.logs import configure, get_logger, log_context
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.messages import Failure, ListedTensors, TrainerStatus, Verify
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import UpdateChannel
from sglang_reshard.sources import NamedTensors
from sglang_reshard.trainer.coordinator import Send, SenderConfig, UpdateCoordinator, UpdateOptions
from sglang_reshard.trainer.publisher import PublishedShards, ShardPublisher
from sglang_reshard.trainer.worker import Shards, TrainerWorker
from sglang_reshard.transports.memory import MemoryExporter, host_identity

logger = get_logger(__name__)


class UpdateSender:
    """One trainer rank's end of a session with one engine. Not for use from several threads at once."""

    def __init__(
        self,
        session: Session,
        rank: int,
        global_ranks: tuple[int, ...],
        send: Send | None,
        config: SenderConfig,
        shared_memory: MemoryExporter | None = None,
    ) -> None:
        """Begins to take part in an open session.

        rank           trainer rank
        global_ranks   the rank of each trainer rank in torch.distributed's world, as device meshes list them
        send           sends a request to the engine and returns its answer; on trainer rank 0, None on the others
        shared_memory  of the senders to all engines, see `ShardPublisher`
        """
        if (send is not None) != (rank == 0):
            raise ValueError("send must be given on trainer rank 0, and must be None on the others")
        if config.bucket_bytes < 1 or config.timeout_s <= 0:
            raise ValueError(f"bucket_bytes={config.bucket_bytes} and timeout_s={config.timeout_s} must be positive")
        configure()
        self._config, self._send = config, send
        self._closed = False
        self._session, self._rank, self._global_ranks = session, rank, global_ranks
        self._host = host_identity()
        self._coordinator = UpdateCoordinator(session, global_ranks, send, config) if send is not None else None
        self._publisher = ShardPublisher(session, rank, global_ranks, shared_memory)
        self._worker = TrainerWorker(session, rank, config.timeout_s)
        self._timeout_s = config.timeout_s
        self._update = 0
        self._updating = threading.Lock()
        self._channel: UpdateChannel | None = None  # of the update under way
        self._lost_peer = ""  # which trainer rank has died, so that no update can succeed any more
        session.watch_peers(f"trainer rank {rank}", self._on_lost_peer)

    @renamed_keywords(let_go="unmap_after")
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
        unmap_after: bool = False,
        partial: bool = False,
    ) -> UpdateReport:
        """Updates the engine to these weights. Collective: all trainer ranks pass the same names in the same order.

        named_tensors   (name, tensor) pairs, or the module itself, see `sglang_reshard.sources.describe`; the shards
                        are not gathered
        weight_version  the engine's weight_version from now on; None leaves it unchanged
        ignore          fnmatch patterns ("model.layers.61.*") of names that the engine need not read. Any other name
                        that it does not read is refused, unless it is tied to a tensor that is sent
        check_finite    refuse shards with NaN or infinite values
        verify          compare checksums of the received weights with the trainer's: "full" reads every element on both
                        sides once more, "sample" one row in 64, others in each update
        staged          receive into shadow weights: a failure before all have arrived and been verified leaves the old
                        weights serving. Takes as much memory again as the weights
        unmap_after     engine ranks unmap the shards' memory at the end, for a trainer that offloads it now: freed
                        memory that another process maps is not free. The next update maps it again, and plans again
        partial         each trainer rank passes the tensors that it holds, and others other ones: the layers of its
                        pipeline stage, its own experts. A plain tensor is held by the ranks that pass it. Names and
                        shardings are agreed on by metadata only; in an unchanged update, by a hash of each rank

        Raises, on every trainer rank: Unsupported or Mismatch for weights that cannot be sent, DeadlineExceeded for a
        rank that does not participate, EngineRefused for what the engine refuses. The old weights keep serving then,
        except after TornWeights: only a successful update restores the engine. Raises Aborted or ConnectionLost if a
        rank has died before the engine answered; if its weights are torn, it refuses to generate.
        """
        if not self._updating.acquire(blocking=False):
            raise Mismatch(
                f"trainer rank {self._rank}: update {self._update} is running in another thread; wait for it to return"
            )
        try:
            options = UpdateOptions(
                weight_version,
                flush_cache,
                abort_all_requests,
                tuple(ignore),
                check_finite,
                verify,
                staged,
                unmap_after,
                partial,
            )
            return self._run_update(named_tensors, options)
        finally:
            self._updating.release()

    def _run_update(self, named_tensors: NamedTensors | torch.nn.Module, options: UpdateOptions) -> UpdateReport:
        started = time.perf_counter()
        self._update += 1
        rank_name, session = f"trainer rank {self._rank}", self._session.address.session
        labels = {"session": session, "update": self._update, "version": options.weight_version or ""}
        with log_context(**labels, rank=rank_name), self._span("reshard.update", **labels) as span:
            with self._session.update_channel(self._update, rank_name) as channel, self._unless_peer_lost(channel):
                published, shards = self._publish(channel, named_tensors, options)
                if self._coordinator is not None:
                    self._coordinator.begin(channel, published, options, started)
                result = self._worker.run(channel, published, shards)
            if result.failure is not None:
                raise result.failure.error()
            report = result.report
            assert report is not None
            spans.set_attributes(span, transport=report.transport, received_bytes=report.received_bytes)
            if self._rank == 0:
                logger.info("update %d: %s", self._update, report.line())
            return report

    def _span(self, name: str, **attributes: Any) -> contextlib.AbstractContextManager[Any]:
        """Opens a span on trainer rank 0 only; the others would duplicate it, each in a trace of its own."""
        return spans.span(name, **attributes) if self._rank == 0 else contextlib.nullcontext()

    def release(self) -> None:
        """Drops views of the shards; call it before weights are offloaded or freed between updates.

        Trainer ranks that send (transport="p2p", or engine ranks on other hosts) keep views of their shards, and so
        their memory, between updates. The next update makes them again. Otherwise it does nothing.
        """
        if not self._updating.acquire(blocking=False):
            raise Mismatch(f"trainer rank {self._rank}: update {self._update} is running; call release after it")
        try:
            self._worker.release()
        finally:
            self._updating.release()

    def close(self) -> None:
        """Ends the session. Collective. Engine ranks unmap the shards' memory."""
        if self._closed:
            return
        self._closed = True
        self._worker.release()
        self._publisher.close()
        if self._rank == 0:
            self._session.end(len(self._global_ranks))
        else:
            self._session.leave(self._rank)

    @contextlib.contextmanager
    def _unless_peer_lost(self, channel: UpdateChannel) -> Iterator[None]:
        """Aborts the update if a trainer rank has died: it would be waited for until the deadline."""
        self._channel = channel
        try:
            if self._lost_peer:
                raise Aborted(self._lost_peer)
            yield
        finally:
            self._channel = None

    def _on_lost_peer(self, reason: str) -> None:
        self._lost_peer = f"{reason}; then make a new WeightSender on every trainer rank"
        if (channel := self._channel) is not None:
            channel.abort(self._lost_peer)

    def _publish(
        self, channel: UpdateChannel, named_tensors: NamedTensors | torch.nn.Module, options: UpdateOptions
    ) -> tuple[PublishedShards | None, Shards]:
        """Publishes what has changed about this rank's shards, and its status for rank 0.

        Returns what is published, and a function that returns the shards, which is called only if they are sent.
        """
        published, failure = None, None
        exchanged = not options.partial

        def exchange(layout: str, failure: Failure | None = None) -> list[str]:
            nonlocal exchanged
            exchanged = True
            own, size = ListedTensors(layout, failure), len(self._global_ranks)
            return channel.exchange_layouts(self._rank, size, own, self._timeout_s)

        try:
            named_tensors = _repeatable(named_tensors)
            with self._span("reshard.publish"):
                published = self._publisher.publish(
                    named_tensors,
                    check_finite=options.check_finite,
                    exchange=exchange if options.partial else None,
                )
        except Exception as error:
            failure = Failure.of(error)
            if not exchanged:  # the others wait for it
                with contextlib.suppress(ReshardError):
                    exchange("", failure)
            if not isinstance(error, ReshardError):
                logger.exception("trainer rank %d cannot participate in update %d", self._rank, self._update)
        if published is None:
            status = TrainerStatus(self._host, "", "", failure)
        else:
            prepared = self._worker.prepared_transfer(published)
            status = TrainerStatus(self._host, published.layout, published.handles, None, prepared, published.device)
        channel.publish_status(self._rank, status)
        return published, functools.partial(self._publisher.shards, named_tensors)


def _repeatable(named_tensors: NamedTensors | torch.nn.Module) -> NamedTensors | torch.nn.Module:
    """Returns tensors that can be iterated over twice: to publish them, and to send them."""
    return named_tensors if isinstance(named_tensors, (torch.nn.Module, Collection)) else list(named_tensors)
