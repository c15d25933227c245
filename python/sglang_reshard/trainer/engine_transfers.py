"""Prepares and runs one trainer rank's transfers to one engine, as that engine's commands say.

    PrepareSend    fetch the send requests of engine ranks, make views and buffers, or register memory; report ready
    ConnectPeers   connect to the engine ranks
    StartTransfer  send

Send requests, views, buffers and connections are kept, so that the next update needs only `StartTransfer`, or nothing
if the engine reads by NIXL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from sglang_reshard.delta.section import DeltaSection
from sglang_reshard.delta.source import DeltaSource, send_sections
from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.gpu.announce import trainer_device
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.plan.p2p import SendRequest
from sglang_reshard.protocol.messages import Command, ConnectPeers, PrepareSend, StartTransfer
from sglang_reshard.protocol.session import Link, Session, remote_shards_key
from sglang_reshard.protocol.update_channel import EngineScope
from sglang_reshard.protocol.validation import check_prepare_send, check_send_request
from sglang_reshard.trainer.publisher import PublishedShards
from sglang_reshard.transports.communicator import P2pCommunicators
from sglang_reshard.transports.nixl_source import NixlSource
from sglang_reshard.transports.p2p import P2pSender, sent_link

logger = get_logger(__name__)
Shards = Callable[[], Sequence[torch.Tensor]]  # returns this rank's, in the layout's order


@dataclass(slots=True)
class _Prepared:
    """A transfer that is kept between updates. A rank that sends nothing has no communicators to connect.

    shards      `PublishedShards.identity`
    registered  its shards, if engine ranks read them by NIXL: then there is neither sender nor communicators
    deltas      by engine rank, what it could send of each link instead; none unless all of them can be sent so
    """

    command: PrepareSend
    shards: tuple[object, ...]
    sender: P2pSender | None = None
    communicators: P2pCommunicators | None = None
    registered: NixlSource | None = None
    deltas: dict[int, DeltaSource] | None = None
    connected: bool = False


class EngineTransfers:
    """One trainer rank's side of the transfers to one engine. Commands of one engine are executed one at a time."""

    def __init__(self, session: Session, engine: int, trainer_rank: int, deltas: DeltaSources) -> None:
        """`deltas` are those of all engines of the session."""
        self._session, self._engine, self._rank, self._deltas = session, engine, trainer_rank, deltas
        self._send_requests: dict[int, tuple[str, SendRequest]] = {}  # by engine rank, with its read plan's digest
        self._prepared: _Prepared | None = None

    def prepared_transfer(self, published: PublishedShards) -> str:
        """Returns the transfer that is prepared for these shards; empty if there is none.

        One for other shards is kept until the next `PrepareSend`: an update that is refused for its names is followed
        by one with the right ones.
        """
        prepared = self._prepared
        if prepared is None or not prepared.connected:
            return ""
        return prepared.command.transfer if prepared.shards == published.identity else ""

    @property
    def writable_bytes(self) -> int:
        """Bytes of this rank's memory that engine ranks could write to."""
        registered = self._prepared.registered if self._prepared is not None else None
        return registered.writable_bytes if registered is not None else 0

    def encode(self, published: PublishedShards, update: int) -> dict[int, DeltaSection] | None:
        """Encodes what has changed, if that is all that the engine needs; returns a section for each engine rank."""
        prepared = self._prepared
        if not self.prepared_transfer(published) or prepared is None or prepared.deltas is None:
            return None
        if not all(delta.encode(update) for delta in prepared.deltas.values()):
            return None
        return {e: _announced(delta, prepared.registered) for e, delta in prepared.deltas.items()}

    def commit(self, update: int) -> None:
        """The engine has the weights of `update`. What fails here fails no update: the next one sends everything."""
        prepared = self._prepared
        if prepared is None or prepared.deltas is None:
            return
        try:
            for delta in prepared.deltas.values():
                delta.commit(update)
        except Exception:
            logger.exception("trainer rank %d cannot keep what it has sent, and sends no deltas", self._rank)
            prepared.deltas = None

    def execute(self, scope: EngineScope, command: Command, published: PublishedShards, shards: Shards) -> None:
        if isinstance(command, PrepareSend):
            check_prepare_send(command, published.source.trainer_ranks)
            self.release()
            self._prepared = self._prepare(command, published, shards())
            scope.report_ready(self._rank)
        elif (prepared := self._prepared) is None:
            return  # PrepareSend failed, which has aborted the update
        elif isinstance(command, ConnectPeers):
            if prepared.communicators is not None:
                store = self._session.p2p_store(self._engine, prepared.command, scope.scope)
                prepared.communicators.connect(store, self._session.local_address)
            prepared.connected = True
        elif isinstance(command, StartTransfer):
            if command.transfer != prepared.command.transfer or not prepared.connected:
                raise Mismatch(
                    f"trainer rank {self._rank} was asked to start transfer {command.transfer!r}, but has prepared "
                    f"{prepared.command.transfer!r}; this is a bug, please report it"
                )
            if prepared.communicators is None:
                return
            if command.delta and prepared.deltas is not None:
                trainer_ranks = len(prepared.command.round_bytes)
                sections = {trainer_ranks + e: delta for e, delta in prepared.deltas.items()}
                send_sections(sections, prepared.communicators)
            elif prepared.sender is not None:
                prepared.sender.send(prepared.communicators)

    def release(self) -> None:
        """Drops connections, buffers, and the views that keep the shards' memory."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.communicators is not None:
            prepared.communicators.close()
        if prepared is not None and prepared.registered is not None:
            prepared.registered.close()

    def abort(self, _reason: str) -> None:
        """Ends this rank's waits for the engine's ranks. Called from another thread."""
        prepared = self._prepared
        if prepared is not None and prepared.communicators is not None:
            prepared.communicators.abort()

    def _prepare(self, command: PrepareSend, published: PublishedShards, shards: Sequence[torch.Tensor]) -> _Prepared:
        round_bytes = command.round_bytes[self._rank]
        one_sided = command.backend == "nixl"
        requests = self._requests(command, published) if command.delta or not one_sided else {}
        device = _message_device(command.backend if any(round_bytes) else "gloo", shards)
        deltas = None
        if command.delta and all(request.delta for request in requests.values()):
            deltas = {
                e: self._deltas.get(
                    published,
                    shards,
                    request,
                    round_bytes[e],
                    device,
                    f"trainer rank {self._rank}" if one_sided else "",
                )
                for e, request in requests.items()
            }
        if one_sided:
            registered = None
            if any(round_bytes):
                sections = [delta.section for delta in (deltas or {}).values()]
                registered = NixlSource(f"trainer rank {self._rank}", shards, sections)
                self._session.put(registered.remote, remote_shards_key(self._engine, self._rank), hashed=False)
            return _Prepared(command, published.identity, registered=registered, deltas=deltas)
        trainer_ranks = len(command.round_bytes)
        sender = P2pSender(
            published.source,
            shards,
            {trainer_ranks + e: request for e, request in requests.items()},
            {trainer_ranks + e: round_bytes[e] for e in requests},
            device,
        )
        communicators = self._session.p2p_communicators(command, self._rank, device)
        return _Prepared(command, published.identity, sender, communicators, deltas=deltas)

    def _requests(self, command: PrepareSend, published: PublishedShards) -> dict[int, SendRequest]:
        """Returns what each engine rank requests of this rank."""
        requests = {}
        round_bytes = command.round_bytes[self._rank]
        for engine_rank in (e for e, nbytes in enumerate(round_bytes) if nbytes):
            digest = command.read_plans[engine_rank]
            link = Link(self._engine, engine_rank, self._rank)
            known = self._send_requests.get(engine_rank)
            if known is None or known[0] != digest:
                request = self._session.get(link.key(digest), SendRequest, str(link), command.timeout_s, hashed=False)
                check_send_request(request, published.source, self._rank, engine_rank)
                known = digest, request
            self._session.delete(link.key(digest))  # no other rank reads it
            requests[engine_rank] = known
        self._send_requests = requests
        return {engine_rank: request for engine_rank, (_, request) in requests.items()}


class DeltaSources:
    """One trainer rank's, of all engines of a session: engines that are sent the same share one."""

    def __init__(self, base_device: torch.device | None = None) -> None:
        """`base_device`: where what was sent is kept; by default where messages are packed."""
        self._base_device = base_device
        self._known: WeakValueDictionary[tuple[object, ...], DeltaSource] = WeakValueDictionary()

    def get(
        self,
        published: PublishedShards,
        shards: Sequence[torch.Tensor],
        request: SendRequest,
        round_bytes: int,
        device: torch.device,
        read_from: str,
    ) -> DeltaSource:
        key = published.identity, request, round_bytes, device, read_from
        known = self._known.get(key)
        if known is None:
            link = sent_link(published.source, shards, request, round_bytes)
            known = self._known[key] = DeltaSource(link, round_bytes, device, self._base_device, read_from)
        return known


def _announced(delta: DeltaSource, registered: NixlSource | None) -> DeltaSection:
    if registered is None:
        return DeltaSection(delta.checksum, delta.nbytes)
    return DeltaSection(delta.checksum, delta.nbytes, *registered.place(delta.section))


def _message_device(backend: str, shards: Sequence[torch.Tensor]) -> torch.device:
    """Returns where messages are packed: NCCL sends from a GPU's memory only, gloo from the host's, NIXL from both."""
    device = trainer_device(shards)
    if backend == "gloo" or (backend == "nixl" and device is None):
        return torch.device("cpu")
    if device is None:
        raise Unsupported("this process uses no GPU, and NCCL sends between GPUs only; use transport='ipc'")
    return device
