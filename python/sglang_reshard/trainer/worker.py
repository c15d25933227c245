"""What one trainer rank does for engine ranks, when and as they ask for it.

Where engine ranks read trainer memory by themselves, and nothing is verified, nothing here happens but the wait for
the result. Else engine rank 0 says what to do, in words that every trainer rank follows:

    Connect  get the orders of engine ranks, make views and buffers, answer `ready`
    Join     connect to those who send and receive
    Move     send
    Vouch    say what the digests of the engine ranks' weights must be
    Done     trainer rank 0's word: how the update ended

Send requests, views, buffers and connections are kept: the next update needs only `StartTransfer` and
`RequestChecksums`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_reshard.digest.regions import RegionSet
from sglang_reshard.digest.source import SourceChecksums
from sglang_reshard.errors import Aborted, Mismatch, ReshardError
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
from sglang_reshard.protocol.validation import check_connect, check_order
from sglang_reshard.trainer.publisher import PublishedShards
from sglang_reshard.transports.p2p import P2pSender
from sglang_reshard.transports.communicator import P2pCommunicator

logger = get_logger(__name__)
Shards = Callable[[], Sequence[torch.Tensor]]  # this rank's, in the layout's order


@dataclass(slots=True)
class _Route:
    """What stands between updates. `peers` is None until all have joined, and where this rank sends nothing."""

    connect: PrepareSend
    layout: str
    handles: str
    device: torch.device
    outlet: P2pSender
    peers: P2pCommunicator | None = None
    joined: bool = False


@dataclass(frozen=True, slots=True)
class _Vouching:
    """What this rank vouches with, for one set of claims and shards."""

    asked: tuple[str, ...]
    layout: str
    handles: str
    voucher: SourceChecksums


class TrainerWorker:
    """One trainer rank's."""

    def __init__(self, session: Session, trainer_rank: int, timeout_s: float) -> None:
        self._session, self._rank, self._timeout_s = session, trainer_rank, timeout_s
        self._orders: dict[int, tuple[str, SendRequest]] = {}  # by engine rank, with the digest of its intake
        self._claims: dict[str, RegionSet] = {}
        self._route: _Route | None = None
        self._vouching: _Vouching | None = None

    def standing(self, published: PublishedShards | None) -> str:
        """The route that is ready for these shards; empty if there is none.

        One for other shards is kept until the next `PrepareSend`: an update that is refused for its names is followed
        by one with the right ones.
        """
        route = self._route
        if route is None or published is None or not route.joined:
            return ""
        ready = (route.layout, route.handles) == (published.layout, published.handles)
        return route.connect.route if ready else ""

    def follow(self, talk: UpdateChannel, published: PublishedShards | None, shards: Shards) -> UpdateResult:
        """Do what is said in an update, until its end.

        A failure here gives the update up on all ranks, who are told why, and is not raised: the last word tells how
        the update ended. Raises Aborted where no such word comes.
        """
        talk.watch(self._break_off)
        said = False
        try:
            for word in talk.words(2 * self._timeout_s):
                if isinstance(word, UpdateResult):
                    if said and word.failure is not None:
                        self.drop()
                    return word
                said = True
                try:
                    self._heed(talk, word, published, shards)
                except Aborted:
                    pass  # as the next word will tell
                except Exception as error:
                    if not isinstance(error, ReshardError):
                        logger.exception("trainer rank %d failed in update %d", self._rank, talk.update)
                    talk.fail(error, _told(self._rank, error))
        except BaseException:
            self.drop()
            raise
        raise AssertionError("words end with Done")

    def drop(self) -> None:
        """Give up what is ready: connections, buffers, and the views that keep the shards' memory."""
        self._vouching = None
        route, self._route = self._route, None
        if route is not None and route.peers is not None:
            route.peers.close()

    def _break_off(self, _reason: str) -> None:
        """From another thread: end a wait for messages."""
        route = self._route
        if route is not None and route.peers is not None:
            route.peers.abort()

    def _heed(self, talk: UpdateChannel, word: Command, published: PublishedShards | None, shards: Shards) -> None:
        assert not isinstance(word, UpdateResult)
        if published is None:
            raise Mismatch(f"trainer rank {self._rank} has published nothing that it could send")
        if isinstance(word, PrepareSend):
            check_connect(word, published.source.trainer_ranks)
            self.drop()
            self._route = self._prepared(word, published, shards())
            talk.ready(self._rank)
        elif isinstance(word, RequestChecksums):
            talk.vouch(self._rank, self._voucher(word, published, shards).part(word.selection))
        elif self._route is not None:
            self._go(talk, self._route, word)

    def _go(self, talk: UpdateChannel, route: _Route, word: Command) -> None:
        if isinstance(word, ConnectPeers):
            route.peers = self._session.connect_peers(route.connect, self._rank, route.device, talk.scope)
            route.joined = True
            return
        assert isinstance(word, StartTransfer)
        if word.route != route.connect.route or not route.joined:
            raise Mismatch(
                f"trainer rank {self._rank} was asked to send for another preparation than its last; "
                "this is a bug, please report it"
            )
        if route.peers is not None:
            route.outlet.send(route.peers)

    def _prepared(self, connect: PrepareSend, published: PublishedShards, shards: Sequence[torch.Tensor]) -> _Route:
        own = connect.shares[self._rank]
        orders = {}
        for engine_rank in (e for e, share in enumerate(own) if share):
            digest = connect.intakes[engine_rank]
            known = self._orders.get(engine_rank)
            if known is None or known[0] != digest:
                known = digest, self._session.get_order(digest, engine_rank, self._rank, connect.timeout_s)
                check_order(known[1], published.source, self._rank, engine_rank)
            self._session.forget_order(digest, engine_rank, self._rank)  # nobody else reads it
            orders[engine_rank] = known
        self._orders = orders
        trainer_ranks = len(connect.shares)
        device = _device(connect.backend, shards)
        outlet = P2pSender(
            published.source,
            shards,
            {trainer_ranks + e: order for e, (_, order) in orders.items()},
            {trainer_ranks + e: own[e] for e in orders},
            device,
        )
        return _Route(connect, published.layout, published.handles, device, outlet)

    def _voucher(self, asked: RequestChecksums, published: PublishedShards, shards: Shards) -> SourceChecksums:
        known = self._vouching
        key = asked.claims, published.layout, published.handles
        if known is None or (known.asked, known.layout, known.handles) != key:
            self._claims = {
                digest: self._claims.get(digest) or self._session.get_claims(rank, digest, self._timeout_s)
                for rank, digest in enumerate(asked.claims)
            }
            claims = [self._claims[digest] for digest in asked.claims]
            known = self._vouching = _Vouching(*key, SourceChecksums(published.source, shards(), self._rank, claims))
        return known.voucher


def _told(trainer_rank: int, error: Exception) -> str:
    said = str(error) if isinstance(error, ReshardError) else f"{type(error).__name__}: {error}"
    return said if said.startswith("trainer rank") else f"trainer rank {trainer_rank}: {said}"


def _device(backend: str, shards: Sequence[torch.Tensor]) -> torch.device:
    """Where messages are packed: NCCL takes a GPU's memory only, gloo the host's."""
    if backend != "nccl":
        return torch.device("cpu")
    on_gpu = next((shard.device for shard in shards if shard.is_cuda), None)
    return on_gpu or torch.device("cuda", torch.cuda.current_device())
