"""What one trainer rank sends to engine ranks, when and as they ask for it.

Where engine ranks read trainer memory by themselves, nothing here happens but the wait for the result.
Where they do not, engine rank 0 says what to do, in words that every trainer rank follows:

    Connect  get the orders of engine ranks, make views and buffers, answer `ready`
    Join     connect to those who send and receive
    Move     send
    Done     trainer rank 0's word: how the update ended

Orders, views, buffers and connections stay for the next update, which then needs no word but `Move`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sglang_reshard.errors import DeadlineExceeded, Mismatch, ReshardError
from sglang_reshard.messages import Connect, Done, Failure, Join, Word
from sglang_reshard.plan.streams import Order
from sglang_reshard.publisher import Published
from sglang_reshard.session import Session
from sglang_reshard.transports.p2p import Outlet
from sglang_reshard.transports.peers import Peers, join_peers

logger = logging.getLogger(__name__)
Shards = Callable[[], Sequence[torch.Tensor]]  # this rank's, in the layout's order


@dataclass(slots=True)
class _Route:
    """What stands between updates. `peers` is None until all have joined, and where this rank sends nothing."""

    connect: Connect
    layout: str
    handles: str
    device: torch.device
    outlet: Outlet
    peers: Peers | None = None
    joined: bool = False


class Outbound:
    """One trainer rank's."""

    def __init__(self, session: Session, trainer_rank: int, timeout_s: float) -> None:
        self._session, self._rank, self._timeout_s = session, trainer_rank, timeout_s
        self._orders: dict[int, tuple[str, Order]] = {}  # by engine rank, with the digest of its intake
        self._route: _Route | None = None
        self._beside: threading.Thread | None = None
        self._line: Session | None = None  # the thread's own connection: while one waits on a store, others cannot

    def standing(self, published: Published | None) -> str:
        """The route that is ready for these shards; empty if there is none.

        One for other shards is kept until the next `Connect`: an update that is refused for its names is followed
        by one with the right ones.
        """
        route = self._route
        if route is None or published is None or not route.joined:
            return ""
        ready = (route.layout, route.handles) == (published.layout, published.handles)
        return route.connect.route if ready else ""

    def follow(self, update: int, published: Published | None, shards: Shards) -> Done:
        """Do what is said in an update, until its end. A failure here is told to the others, and not raised."""
        return self._follow(self._session, update, published, shards)

    @contextmanager
    def followed(self, update: int, published: Published | None, shards: Shards) -> Iterator[None]:
        """Follow in a thread while the block runs, which has to end with saying `Done`: trainer rank 0's way.

        Raises DeadlineExceeded when what is to be sent is stuck.
        """
        if self._beside is not None and self._beside.is_alive():
            raise DeadlineExceeded(
                f"trainer rank {self._rank}: what an earlier update had to send is stuck still; start a new session"
            )
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def follow() -> None:
            try:
                if gpu is not None:
                    torch.cuda.set_device(gpu)  # a thread begins at GPU 0
                self._line = self._line or Session.join(self._session.address, self._timeout_s)
                self._follow(self._line, update, published, shards)
            except Exception:
                logger.exception("trainer rank %d followed update %d no longer", self._rank, update)
                self.drop()

        self._beside = thread = threading.Thread(target=follow, name="sglang-reshard outbound", daemon=True)
        thread.start()
        try:
            yield
        finally:
            thread.join(2 * self._timeout_s)
        if thread.is_alive():
            raise DeadlineExceeded(f"trainer rank {self._rank}: sending did not end within {2 * self._timeout_s:.0f} s")

    def drop(self) -> None:
        """Give up what is ready: connections, buffers, and the views that keep the shards' memory."""
        route, self._route = self._route, None
        if route is not None and route.peers is not None:
            route.peers.close()

    def _follow(self, session: Session, update: int, published: Published | None, shards: Shards) -> Done:
        said = False
        for word in session.words(update, 2 * self._timeout_s):
            if isinstance(word, Done):
                if said and word.failure is not None:
                    self.drop()
                return word
            said = True
            failure = None
            try:
                self._heed(session, word, published, shards)
            except Exception as error:
                if not isinstance(error, ReshardError):
                    logger.exception("trainer rank %d could not send in update %d", self._rank, update)
                failure = Failure.of(error)
            if isinstance(word, Connect):
                session.ready(update, self._rank, failure)
            elif failure is not None:
                session.mishap(update, self._rank, failure)
            if failure is not None:
                self.drop()  # after having said why: peers notice now
        raise AssertionError("words end with Done")

    def _heed(self, session: Session, word: Word, published: Published | None, shards: Shards) -> None:
        if isinstance(word, Connect):
            self.drop()
            if published is None:
                raise Mismatch(f"trainer rank {self._rank} has published nothing that it could send")
            self._route = self._prepared(session, word, published, shards())
            return
        route = self._route
        if route is None:
            return  # it failed, and that was said
        if isinstance(word, Join):
            self._join(session, route)
            return
        assert not isinstance(word, Done)
        if word.route != route.connect.route or not route.joined:
            raise Mismatch(
                f"trainer rank {self._rank} was asked to send for another preparation than its last; "
                "this is a bug, please report it"
            )
        if route.peers is not None:
            route.outlet.send(route.peers)

    def _prepared(
        self, session: Session, connect: Connect, published: Published, shards: Sequence[torch.Tensor]
    ) -> _Route:
        own = connect.shares[self._rank]
        orders = {}
        for engine_rank in (e for e, share in enumerate(own) if share):
            digest = connect.intakes[engine_rank]
            known = self._orders.get(engine_rank)
            if known is None or known[0] != digest:
                known = digest, session.get_order(digest, engine_rank, self._rank, connect.timeout_s)
            session.forget_order(digest, engine_rank, self._rank)  # nobody else reads it
            orders[engine_rank] = known
        self._orders = orders
        trainer_ranks = len(connect.shares)
        device = _device(connect.backend, shards)
        outlet = Outlet(
            published.source,
            shards,
            {trainer_ranks + e: order for e, (_, order) in orders.items()},
            {trainer_ranks + e: own[e] for e in orders},
            device,
        )
        return _Route(connect, published.layout, published.handles, device, outlet)

    def _join(self, session: Session, route: _Route) -> None:
        route.peers = join_peers(session.store, route.connect, self._rank, route.device)
        route.joined = True


def _device(backend: str, shards: Sequence[torch.Tensor]) -> torch.device:
    """Where messages are packed: NCCL takes a GPU's memory only, gloo the host's."""
    if backend != "nccl":
        return torch.device("cpu")
    on_gpu = next((shard.device for shard in shards if shard.is_cuda), None)
    return on_gpu or torch.device("cuda", torch.cuda.current_device())
