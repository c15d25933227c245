"""Sends updated weights from the trainer ranks to one engine.

    sender = WeightSender("http://gpu7:30000", admin_api_key=...)     # on every trainer rank
    report = sender.update(model.named_parameters(), weight_version="42")

A trainer rank publishes handles of its shards' memory, which engine ranks on the same host map and read. It sends to
the others, see `trainer.worker`. Its weights must not change until `update` returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from sglang_reshard._deprecated import renamed_keywords
from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.control import Address
from sglang_reshard.errors import Aborted, Mismatch, ReshardError, Unsupported
from sglang_reshard.layout.decoders import convert
from sglang_reshard.observability import spans
from sglang_reshard.observability.logs import configure, get_logger, log_context
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.messages import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_TIMEOUT_S,
    Failure,
    ListedTensors,
    LoraAdapter,
    TrainerStatus,
    Verify,
)
from sglang_reshard.protocol.session import LOOPBACK, Session
from sglang_reshard.protocol.update_channel import UpdateChannel
from sglang_reshard.sources import NamedTensors
from sglang_reshard.trainer.collectives import on_first_rank
from sglang_reshard.trainer.coordinator import Send, SenderConfig, UpdateCoordinator, UpdateOptions
from sglang_reshard.trainer.publisher import PublishedShards, ShardPublisher
from sglang_reshard.trainer.worker import Shards, TrainerWorker
from sglang_reshard.transports.memory import MemoryExporter, host_identity

logger = get_logger(__name__)


class WeightSender:
    """One trainer rank's end of a session with one engine. Not for use from several threads at once."""

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
        """Opens a session with a server. Collective over `group`.

        url, api_key, admin_api_key   of the server, see `RemoteEngine`, also for their defaults
        group         process group of the trainer ranks, with a CPU backend; by default all ranks
        interface     address of rank 0's host at which engine ranks connect to it; by default that of the interface
                      towards the server
        transport     "auto", "ipc", "p2p", "broadcast" or "nixl", see `plan.strategy`
        bucket_bytes  size of a bucket; a rank holds at most two
        timeout_s     seconds that any one wait may last

        Raises, on every rank: EngineRefused for a server that does not answer, Unauthorized for a wrong key,
        Unsupported for a server without this package, Mismatch for one with another version of it.
        """
        group = group or dist.group.WORLD
        assert group is not None, "init_process_group has not been called"
        remote, reached = connect_server(group, url, api_key=api_key, admin_api_key=admin_api_key, timeout_s=timeout_s)
        send = remote.update_weights_distributed if remote is not None else None
        self._begin(
            *_open_session(group, interface or reached, timeout_s),
            send,
            SenderConfig(transport, bucket_bytes, timeout_s),
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
        """Opens a session with an engine to which `send` sends requests. Collective over `group`.

        group  process group of the trainer ranks, with a CPU backend
        send   sends a request to the engine and returns its answer; on rank 0 of the group, None on the others
        """
        sender = cls.__new__(cls)
        config = SenderConfig(transport, bucket_bytes, timeout_s)
        sender._begin(*_open_session(group, interface, timeout_s), send, config)
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
        lora: LoraAdapter | None = None,
        shared_memory: MemoryExporter | None = None,
    ) -> WeightSender:
        """Uses a session that is open already.

        global_ranks   the rank of each trainer rank in torch.distributed's world, as device meshes list them
        send           sends a request to the engine and returns its answer; on trainer rank 0, None on the others
        lora           the adapter that is updated, see `lora_adapter`; by default the model's own weights
        shared_memory  of the senders to all engines, see `ShardPublisher`
        """
        sender = cls.__new__(cls)
        config = SenderConfig(transport, bucket_bytes, timeout_s, lora)
        sender._begin(session, trainer_rank, global_ranks, send, config, shared_memory)
        return sender

    def lora_adapter(self, name: str, config: str) -> WeightSender:
        """Opens a session for a LoRA adapter that the same engine serves. Collective.

            policy = sender.lora_adapter("policy", adapter_config(model))
            policy.update(adapter_tensors(model), weight_version="42")     # only the adapter's tensors move

        name    under which requests ask for it, as `lora_path`; the engine need not have it yet
        config  see `sources.adapter_config`

        Every engine rank receives the whole adapter, as SGLang keeps it, beside the one that is served, which it
        replaces once all ranks have all of it. Requests see the old adapter or the new one, as in other updates. If an
        engine fails while it replaces the adapter, requests for it are refused until an update of it succeeds; the
        model and other adapters keep serving.
        """
        if name in self._adapters and not self._adapters[name]._closed:
            raise Mismatch(f"lora_adapter was called for {name} before; use the sender that it returned")
        session = Session.join(self._session.address.named(f"lora/{name}"), self._timeout_s)
        self._adapters[name] = adapter = WeightSender.__new__(WeightSender)
        options = dataclasses.replace(self._config, lora=LoraAdapter(name, config))
        adapter._begin(session, self._rank, self._global_ranks, self._send, options)
        return adapter

    def _begin(
        self,
        session: Session,
        rank: int,
        global_ranks: tuple[int, ...],
        send: Send | None,
        config: SenderConfig,
        shared_memory: MemoryExporter | None = None,
    ) -> None:
        if (send is not None) != (rank == 0):
            raise ValueError("send must be given on trainer rank 0, and must be None on the others")
        if config.bucket_bytes < 1 or config.timeout_s <= 0:
            raise ValueError(f"bucket_bytes={config.bucket_bytes} and timeout_s={config.timeout_s} must be positive")
        configure()
        self._config, self._send = config, send
        self._adapters: dict[str, WeightSender] = {}
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
        """Ends the session, and those of its LoRA adapters. Collective. Engine ranks unmap the shards' memory."""
        if self._closed:
            return
        self._closed = True
        for adapter in self._adapters.values():
            adapter.close()
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


def connect_server(group: dist.ProcessGroup, url: str | None, **options: Any) -> tuple[RemoteEngine | None, str]:
    """Checks the server from the group's first rank. Collective.

    Returns the client on the first rank (None on others), and the address of the first rank's interface towards the
    server. `options` are those of `RemoteEngine`. Raises on every rank what `RemoteEngine.check` raises on the first.
    """
    remote: list[RemoteEngine] = []

    def connect() -> str:
        remote.append(RemoteEngine(url, **options))
        remote[0].check()
        return remote[0].local_address()

    address = on_first_rank(connect, group)
    return (remote[0] if remote else None), address


def _open_session(group: dist.ProcessGroup, interface: str, timeout_s: float) -> tuple[Session, int, tuple[int, ...]]:
    """Opens a session that the group's rank 0 hosts on `interface`. Collective.

    Returns it with the trainer rank, and the global rank of each trainer rank.
    """
    hosted: list[Session] = []

    def host() -> Any:
        try:
            hosted.append(Session.host(interface, timeout_s))
        except OSError as error:
            raise Unsupported(f"interface={interface!r} is not an address of trainer rank 0's host: {error}") from error
        return msgspec.to_builtins(hosted[0].address)

    address = convert(on_first_rank(host, group), Address)
    session = hosted[0] if hosted else Session.join(address, timeout_s)
    return session, dist.get_rank(group), tuple(dist.get_process_group_ranks(group))


def _repeatable(named_tensors: NamedTensors | torch.nn.Module) -> NamedTensors | torch.nn.Module:
    """Returns tensors that can be iterated over twice: to publish them, and to send them."""
    return named_tensors if isinstance(named_tensors, (torch.nn.Module, Collection)) else list(named_tensors)
