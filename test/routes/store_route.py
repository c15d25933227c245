"""A route of one's own: trainer ranks put what engine ranks lack into the session's store, and engine ranks get it.

It is what a route has to be, and no more: slow, as all bytes pass trainer rank 0. It counts them. One line makes it
known:

    sglang_reshard.route_table.ROUTES["store"] = "store_route"
"""

from __future__ import annotations

import torch

from sglang_reshard.observability.report import Traffic
from sglang_reshard.protocol.update_channel import EngineScope
from sglang_reshard.routes.base import EngineEnd, TrainerEnd
from sglang_reshard.routes.p2p.ask import Links, get_send_requests, put_send_requests
from sglang_reshard.routes.p2p.links import build_rounds, engine_links, sent_link, targets_by_round
from sglang_reshard.routes.p2p.messages import round_bytes
from sglang_reshard.routes.strategy import REQUESTED, Strategy, demanded_bytes

CPU = torch.device("cpu")


def plan(_index, demands, topology, bucket_bytes):
    """All is sent, in rounds that fit a bucket."""
    read, unread = demanded_bytes(demands, topology)
    return Strategy("store", REQUESTED, round_bytes(read + unread, bucket_bytes))


def _key(transfer, trainer_rank, engine_rank, number):
    return f"{transfer}/{trainer_rank}/{engine_rank}/{number}"


class StoreEngineEnd(EngineEnd):
    calls = True

    def __init__(self, side, strategy):
        self._side, self._links = side, Links.of(side.read_plans, strategy.round_bytes)
        self._sizes = strategy.senders(side.engine_rank)
        self._received = 0

    def ask(self, session):
        put_send_requests(session, self._side, self._sizes, False, False)
        return self._side.prepare("store", self._links)

    def connect(self, meeting):
        reads, self._session = self._side.reads, meeting.session
        plan, sizes = reads.read_plan, self._sizes
        self._landing = reads.landing
        if reads.program.arrivals:  # what is converted needs memory, and views of it
            self._landing.place(targets_by_round(engine_links(reads, sizes), plan), ())
        self._rounds, self.nbytes = build_rounds(engine_links(reads, sizes), CPU, pack=False)

    @property
    def traffic(self):
        return Traffic(self._received)

    def move(self, request, taken):
        self._received, client = 0, self._session.client
        scope = EngineScope(client, request.update, self._side.request.engine, "").scope
        for number, (buffers, copies) in enumerate(self._rounds):
            for trainer_rank, buffer in buffers:
                key = _key(self._side.transfer, trainer_rank, self._side.engine_rank, number)
                (data,) = client.get([key], self._side.reads.timeout_s, scope)  # ends when a trainer rank fails
                client.delete_keys([key])
                self._received += len(data)
                buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            copies.run()
            if number < self._landing.turns:
                self._landing.arrived(number)


class StoreTrainerEnd(TrainerEnd):
    def __init__(self, side, command):
        links = command.asked(Links)
        links.check(side.layout.trainer_ranks)
        sizes, requests = links.of_trainer_rank(side.trainer_rank), get_send_requests(side, links)
        sent = {e: sent_link(side.layout, side.shards, request, sizes[e]) for e, request in requests.items()}
        self._side, (self._rounds, _) = side, build_rounds(sent, CPU, pack=True)

    def start(self, taken):
        side = self._side
        for number, (buffers, copies) in enumerate(self._rounds):
            copies.run()
            for engine_rank, buffer in buffers:
                key = _key(side.transfer, side.trainer_rank, engine_rank, number)
                side.session.client.set({key: buffer.numpy().tobytes()})


engine_end, trainer_end = StoreEngineEnd, StoreTrainerEnd
