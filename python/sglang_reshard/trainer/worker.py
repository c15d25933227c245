"""Executes the commands of engine rank 0 on one trainer rank, until trainer rank 0 reports the result.

    PrepareSend       fetch the send requests of engine ranks, make views and buffers, or register memory; report ready
    ConnectPeers      connect to the engine ranks
    StartTransfer     send
    RequestChecksums  compute the checksums that the engine ranks' weights must have
    UpdateResult      the update has ended

Engine ranks that can map this rank's memory read it without a command: then a trainer rank only waits for the result,
unless the update is verified. Send requests, views, buffers and connections are kept, so that the next update needs
only `StartTransfer` and `RequestChecksums`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_reshard.digest.regions import RegionSet
from sglang_reshard.digest.source import SourceChecksums
from sglang_reshard.errors import Aborted, Mismatch, ReshardError, Unsupported
from sglang_reshard.gpu.announce import trainer_device
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.plan.p2p import SendRequest
from sglang_reshard.protocol.messages import (
    Command,
    ConnectPeers,
    PrepareSend,
    RequestChecksums,
    StartTransfer,
    UpdateResult,
)
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import UpdateChannel
from sglang_reshard.protocol.validation import check_prepare_send, check_send_request
from sglang_reshard.trainer.publisher import PublishedShards
from sglang_reshard.transports.communicator import P2pCommunicators
from sglang_reshard.transports.nixl_source import NixlSource
from sglang_reshard.transports.p2p import P2pSender

logger = get_logger(__name__)
Shards = Callable[[], Sequence[torch.Tensor]]  # returns this rank's, in the layout's order


@dataclass(slots=True)
class _PreparedSend:
    """What is kept between updates. A rank that sends nothing has no communicators to connect.

    registered  its shards, if engine ranks read them by NIXL: then there is neither sender nor communicators
    """

    command: PrepareSend
    shards: tuple[object, ...]  # `PublishedShards.identity`
    sender: P2pSender | None = None
    communicators: P2pCommunicators | None = None
    registered: NixlSource | None = None
    connected: bool = False


class TrainerWorker:
    """Executes commands on one trainer rank."""

    def __init__(self, session: Session, trainer_rank: int, timeout_s: float) -> None:
        self._session, self._rank, self._timeout_s = session, trainer_rank, timeout_s
        self._send_requests: dict[int, tuple[str, SendRequest]] = {}  # by engine rank, with its read plan's digest
        self._regions: dict[str, RegionSet] = {}
        self._prepared: _PreparedSend | None = None
        self._checksums: tuple[tuple[object, ...], SourceChecksums] | None = None  # with what they were made for

    def prepared_transfer(self, published: PublishedShards | None) -> str:
        """Returns the transfer that is prepared for these shards; empty if there is none.

        One for other shards is kept until the next `PrepareSend`: an update that is refused for its names is followed
        by one with the right ones.
        """
        prepared = self._prepared
        if prepared is None or published is None or not prepared.connected:
            return ""
        return prepared.command.transfer if prepared.shards == published.identity else ""

    def run(self, channel: UpdateChannel, published: PublishedShards | None, shards: Shards) -> UpdateResult:
        """Executes commands until the update ends.

        A failure here aborts the update on all ranks and is not raised: the result reports it. Raises Aborted if no
        result arrives.
        """
        channel.on_abort(self._abort)
        called = False
        try:
            for command in channel.commands(2 * self._timeout_s):
                if isinstance(command, UpdateResult):
                    if called and command.failure is not None:
                        self.release()
                    return command
                called = True
                try:
                    self._handle(channel, command, published, shards)
                except Aborted:
                    pass  # the result reports it
                except Exception as error:
                    if not isinstance(error, ReshardError):
                        logger.exception("trainer rank %d failed in update %d", self._rank, channel.update)
                    channel.abort_because(error, _describe(self._rank, error))
        except BaseException:
            self.release()
            raise
        raise AssertionError("the last command is UpdateResult")

    def release(self) -> None:
        """Drops connections, buffers, and the views that keep the shards' memory."""
        self._checksums = None
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.communicators is not None:
            prepared.communicators.close()
        if prepared is not None and prepared.registered is not None:
            prepared.registered.close()

    def _abort(self, _reason: str) -> None:
        """Ends this rank's waits for its peers. Called from another thread."""
        prepared = self._prepared
        if prepared is not None and prepared.communicators is not None:
            prepared.communicators.abort()

    def _handle(
        self, channel: UpdateChannel, command: Command, published: PublishedShards | None, shards: Shards
    ) -> None:
        if published is None:
            raise Mismatch(f"trainer rank {self._rank} has published nothing that it could send")
        if isinstance(command, PrepareSend):
            check_prepare_send(command, published.source.trainer_ranks)
            self.release()
            prepare = self._register if command.backend == "nixl" else self._prepare
            self._prepared = prepare(command, published, shards())
            channel.report_ready(self._rank)
        elif isinstance(command, RequestChecksums):
            checksums = self._source_checksums(command, published, shards)
            channel.put_checksums(self._rank, checksums.compute(command.selection))
        elif (prepared := self._prepared) is None:
            return  # PrepareSend failed, which has aborted the update
        elif isinstance(command, ConnectPeers):
            if prepared.communicators is not None:
                store = self._session.p2p_store(prepared.command, channel.scope)
                prepared.communicators.connect(store, self._session.local_address)
            prepared.connected = True
        elif isinstance(command, StartTransfer):
            if command.transfer != prepared.command.transfer or not prepared.connected:
                raise Mismatch(
                    f"trainer rank {self._rank} was asked to start transfer {command.transfer!r}, but has prepared "
                    f"{prepared.command.transfer!r}; this is a bug, please report it"
                )
            if prepared.sender is not None and prepared.communicators is not None:
                prepared.sender.send(prepared.communicators)

    def _register(
        self, command: PrepareSend, published: PublishedShards, shards: Sequence[torch.Tensor]
    ) -> _PreparedSend:
        registered = None
        if any(command.round_bytes[self._rank]):
            registered = NixlSource(f"trainer rank {self._rank}", shards)
            self._session.put_remote_shards(self._rank, registered.remote)
        return _PreparedSend(command, published.identity, registered=registered)

    def _prepare(
        self, command: PrepareSend, published: PublishedShards, shards: Sequence[torch.Tensor]
    ) -> _PreparedSend:
        round_bytes = command.round_bytes[self._rank]
        requests = {}
        for engine_rank in (e for e, nbytes in enumerate(round_bytes) if nbytes):
            digest = command.read_plans[engine_rank]
            known = self._send_requests.get(engine_rank)
            if known is None or known[0] != digest:
                request = self._session.get_send_request(digest, engine_rank, self._rank, command.timeout_s)
                check_send_request(request, published.source, self._rank, engine_rank)
                known = digest, request
            self._session.delete_send_request(digest, engine_rank, self._rank)  # no other rank reads it
            requests[engine_rank] = known
        self._send_requests = requests
        trainer_ranks = len(command.round_bytes)
        device = _message_device(command.backend if requests else "gloo", shards)
        sender = P2pSender(
            published.source,
            shards,
            {trainer_ranks + e: request for e, (_, request) in requests.items()},
            {trainer_ranks + e: round_bytes[e] for e in requests},
            device,
        )
        communicators = self._session.p2p_communicators(command, self._rank, device)
        return _PreparedSend(command, published.identity, sender, communicators)

    def _source_checksums(
        self, command: RequestChecksums, published: PublishedShards, shards: Shards
    ) -> SourceChecksums:
        key = command.regions, published.identity
        if self._checksums is None or self._checksums[0] != key:
            self._regions = {
                digest: self._regions.get(digest) or self._session.get_regions(rank, digest, self._timeout_s)
                for rank, digest in enumerate(command.regions)
            }
            regions = [self._regions[digest] for digest in command.regions]
            self._checksums = key, SourceChecksums(published.source, shards(), self._rank, regions)
        return self._checksums[1]


def _describe(trainer_rank: int, error: Exception) -> str:
    description = str(error) if isinstance(error, ReshardError) else f"{type(error).__name__}: {error}"
    named = description.startswith("trainer rank")
    return description if named else f"trainer rank {trainer_rank}: {description}"


def _message_device(backend: str, shards: Sequence[torch.Tensor]) -> torch.device:
    """Returns where messages are packed: NCCL sends from a GPU's memory only, gloo from the host's."""
    if backend != "nccl":
        return torch.device("cpu")
    device = trainer_device(shards)
    if device is None:
        raise Unsupported("this process uses no GPU, and NCCL sends between GPUs only; use transport='ipc'")
    return device
