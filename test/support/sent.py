"""An engine rank that is sent all it lacks: a receiver without its agreements."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from sglang_reshard.control import Control
from sglang_reshard.errors import ReshardError
from sglang_reshard.messages import Connect, DistributedUpdateWeightsOutput, Join, Move
from sglang_reshard.plan import Catalog, Seat, intake
from sglang_reshard.plan.streams import order_of, shares
from sglang_reshard.session import Address, Session
from sglang_reshard.sources import Layout
from sglang_reshard.trace import Program, trace
from sglang_reshard.transports.base import Here
from sglang_reshard.transports.p2p import P2pTransport
from sglang_reshard.transports.peers import join_peers
from support.plans import HOST

CPU = torch.device("cpu")


def here_of(rank: int, catalog: Any, taken: Any, targets: Any, own_shares: dict[int, int], peers: Any) -> Here:
    program = Program((), tuple(taken.copies), targets, (), 0.0)
    return Here(rank, CPU, catalog, taken, program, {}, None, None, own_shares, peers)


class Engine:
    """One engine rank that is sent all it lacks."""

    def __init__(self, rank: int, size: int, model: torch.nn.Module) -> None:
        self.rank, self.model = rank, model
        self.control = Control(torch.distributed.group.WORLD, rank, size)
        self.session: Any = None
        self.transport: Any = None
        self.taken: Any = None
        self.route = ""

    def update(self, request: Any, before_move: Callable[[], None] = lambda: None) -> DistributedUpdateWeightsOutput:
        """The answer; what goes wrong in the move is told, and the connection closed."""
        if self.session is None:
            self.session = Session.join(Address(request.session, request.store_host, request.store_port))
        if self.transport is None or any(route != self.route for route in request.routes):
            self._connect(request)
        error = ""
        try:
            before_move()
            if self.rank == 0:
                self.session.say(request.update, Move(self.route))
            self.transport.move()
            self.program.finish()
        except (ReshardError, OSError) as raised:
            error = f"{type(raised).__name__}: {raised}"
            self.peers.close()
            self.transport = None
        errors = [e for e in self.control.gather(error, 30) if e]
        return DistributedUpdateWeightsOutput(success=not errors, message="; ".join(errors), torn=bool(errors))

    def _connect(self, request: Any) -> None:
        layout = self.session.get_layout(request.layout, Layout, 30)
        self.program = trace(self.model, [t.spec for t in layout.tensors])
        catalog = Catalog.of(layout)
        hosts = (HOST,) * layout.trainer_ranks
        self.taken = intake(catalog, self.program.copies, Seat(self.rank, self.control.size, HOST, hosts))
        for trainer_rank in self.taken.links():
            order = order_of(self.taken, trainer_rank)
            self.session.put_order(self.taken.digest(), self.rank, trainer_rank, order)
        gathered = self.control.gather((self.taken.digest(), self.taken.links()), 30)
        links = torch.zeros(layout.trainer_ranks, self.control.size, dtype=torch.int64).numpy()
        for e, (_, theirs) in enumerate(gathered):
            for trainer_rank, (nbytes, _) in theirs.items():
                links[int(trainer_rank), e] = nbytes
        share = shares(links, request.bucket_bytes)
        self.route = f"route {request.update}"
        connect = Connect(self.route, tuple(d for d, _ in gathered), tuple(map(tuple, share.tolist())), "gloo", 10)
        if self.rank == 0:
            self.session.say(request.update, connect)
            self.session.collect_ready(request.update, layout.trainer_ranks, 30)
            self.session.say(request.update, Join())
        self.peers = join_peers(self.session.store, connect, layout.trainer_ranks + self.rank, CPU)
        own = {t: int(s) for t, s in enumerate(share[:, self.rank]) if s}
        here = here_of(self.rank, catalog, self.taken, self.program.targets, own, self.peers)
        self.transport = P2pTransport(here)


def open_here() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
