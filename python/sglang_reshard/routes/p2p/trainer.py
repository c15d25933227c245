"""A trainer rank's end of p2p: sends exactly the elements that engine ranks lack, as they have requested them.

All views and buffers are made when the transfer is prepared; an update is one `CopyList` per round. Two buckets
alternate: while one is in transit, the other is packed.

No deadlock can arise. All ranks go through the rounds in ascending order, and within a round nothing blocks. A trainer
rank starts the sends of round k when those of round k - 2 are done, an engine rank posts the receives of round k when
it has unpacked round k - 2. So of all messages that have not arrived, those of the lowest round are in transit on both
sides, or will be without waiting for any message that has not arrived. That the messages of a round go over several
communicators changes nothing: see `Communicators`, and `wire.nccl` for why their kernels fit a GPU together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.runtime import trainer_device
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.protocol.messages import Prepare
from sglang_reshard.routes.base import Meeting, TrainerEnd, TrainerSide
from sglang_reshard.routes.p2p.ask import P2pAsk, get_send_requests
from sglang_reshard.routes.p2p.links import build_rounds, sent_link
from sglang_reshard.routes.p2p.messages import SendRequest
from sglang_reshard.routes.wire.communicator import Communicators
from sglang_reshard.routes.wire.rounds import Wait, run_rounds


class P2pSender:
    """Sends shards to engine ranks.

    sent_bytes   in one update, in the shards' dtypes
    extra_bytes  of its buckets, held as long as the sender exists; it keeps the shards alive, too
    """

    def __init__(
        self,
        layout: SourceLayout,
        shards: Sequence[torch.Tensor],
        requests: Mapping[int, SendRequest],
        round_bytes: Mapping[int, int],
        device: torch.device,
    ) -> None:
        """Both `requests` and `round_bytes` (the size of a message) are by the receiver's peer id (`Communicator`).

        shards  this rank's, in the layout's order
        device  of the buckets: that which the communicator's backend sends from
        """
        links = {peer: sent_link(layout, shards, requests[peer], nbytes) for peer, nbytes in round_bytes.items()}
        self._rounds, self.extra_bytes = build_rounds(links, device, pack=True)
        self.sent_bytes = sum(link.payload_bytes for link in links.values())

    def send(self, communicators: Communicators) -> None:
        """Sends all rounds. Returns when the last has been sent; raises as `PendingOps.wait` does."""

        def start(number: int) -> Wait:
            buffers, copies = self._rounds[number]
            copies.run()
            return communicators.send(buffers).wait

        run_rounds(len(self._rounds), start)


class P2pTrainerEnd(TrainerEnd):
    """Sends to the engine ranks of one engine.

    links, requests  of the transfer, and each engine rank's request to this trainer rank
    device           where messages are packed
    communicators    with the engine ranks
    """

    def __init__(self, side: TrainerSide, command: Prepare) -> None:
        ask = command.asked(P2pAsk)
        ask.check(side.layout.trainer_ranks)
        self.links, self.requests = ask.links, get_send_requests(side, ask.links)
        self.device = _device(ask.backend if self.requests else "gloo", side.shards)
        self._side, trainer_ranks = side, side.layout.trainer_ranks
        self._sender = self._sender_of(self.requests.keys())
        self._to_some: tuple[frozenset[int], P2pSender] | None = None
        self.connections = self.communicators = Communicators(
            ask.groups,
            peer_id=side.trainer_rank,
            trainer_ranks=trainer_ranks,
            device=self.device,
            timeout_s=side.timeout_s,
            transfers=side.engines,
        )

    def connect(self, meeting: Meeting) -> None:
        side, session = self._side, meeting.session
        store = dist.PrefixStore(f"p2p/{side.transfer}", session.store(side.engine, side.timeout_s, meeting.scope))
        peers = [side.layout.trainer_ranks + e for e in self.links.of_trainer_rank(side.trainer_rank)]
        self.communicators.connect(store, peers, session.local_address)

    def start(self, taken: bool) -> None:
        self._to_some = None
        self._sender.send(self.communicators)

    def sender_to(self, engine_ranks: Collection[int]) -> P2pSender:
        """Returns what sends to these engine ranks only. It is kept until others are asked for, or all are sent to."""
        wanted = frozenset(engine_ranks)
        if self._to_some is None or self._to_some[0] != wanted:
            self._to_some = None  # so that its buckets are freed
            self._to_some = wanted, self._sender_of(wanted)
        return self._to_some[1]

    def _sender_of(self, engine_ranks: Collection[int]) -> P2pSender:
        side, first_peer = self._side, self._side.layout.trainer_ranks
        sizes = self.links.of_trainer_rank(side.trainer_rank)
        return P2pSender(
            side.layout,
            side.shards,
            {first_peer + e: self.requests[e] for e in sorted(engine_ranks)},
            {first_peer + e: sizes[e] for e in sorted(engine_ranks)},
            self.device,
        )


def _device(backend: str, shards: Sequence[torch.Tensor]) -> torch.device:
    """Returns where messages are packed: NCCL sends from a GPU's memory only, gloo from the host's."""
    if backend == "gloo":
        return torch.device("cpu")
    device = trainer_device(shards)
    if device is None:
        raise Unsupported("this process uses no GPU, and NCCL sends between GPUs only; use transport='ipc'")
    return device
