"""Moves what a plan says: rounds of messages between ranks of one process group, and copies within a rank.

Every rank may send and receive. Both ends of a link cut its stream into the same messages (`routes.p2p.messages`), one
per round, and the messages of a rank's round, in both directions, are one batch: NCCL runs them as one group, within
which no order can deadlock. All ranks go through the rounds in ascending order, so of all messages that have not
arrived, those of the lowest round have been started by both ends, or will be without waiting for another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.errors import DeadlineExceeded
from sglang_reshard.routes.p2p.links import Round
from sglang_reshard.routes.wire.rounds import Wait, run_rounds

_TAG = 0x2E5A  # gloo keeps these messages apart from others between the same ranks


class Mover:
    """One rank's rounds, built once and run as often as wanted.

    sends, receives  the rounds of either direction, by peers' ranks within the group
    local            copies from this rank's own source shards into its target shards
    """

    def __init__(self, group: dist.ProcessGroup, sends: list[Round], receives: list[Round], local: CopyList) -> None:
        self._group, self._sends, self._receives, self._local = group, sends, receives, local
        self._rank = dist.get_rank(group)
        # Of each round, with what an error calls them.
        self._operations = [self._batch(number) for number in range(max(len(sends), len(receives)))]

    def run(self) -> None:
        """Collective. On GPUs it returns when all is enqueued on the current stream, as torch's collectives do.

        Raises DeadlineExceeded, naming the ranks, if a message does not pass within the group's timeout or a connection
        breaks.
        """
        run_rounds(len(self._operations), self._start, self._unpack, self._local.run)

    def _batch(self, number: int) -> list[tuple[dist.P2POp, str]]:
        found = []
        for rounds, call, verb in ((self._receives, dist.irecv, "receive from"), (self._sends, dist.isend, "send to")):
            for peer, buffer in rounds[number][0] if number < len(rounds) else ():
                operation = dist.P2POp(call, buffer, group=self._group, tag=_TAG, group_peer=peer)
                found.append((operation, f"{verb} trainer rank {peer}"))
        return found

    def _start(self, number: int) -> Wait:
        if number < len(self._sends):
            self._sends[number][1].run()
        batch = self._operations[number]
        names = [name for _, name in batch]
        with _named_errors(self._rank, ", ".join(names)):
            works = dist.batch_isend_irecv([operation for operation, _ in batch]) if batch else []
        if len(works) != len(batch):  # NCCL has one operation for all messages of a round
            names = [", ".join(names)] * len(works)

        def wait() -> None:
            for work, peers in zip(works, names, strict=True):
                with _named_errors(self._rank, peers):
                    work.wait()

        return wait

    def _unpack(self, number: int) -> None:
        if number < len(self._receives):
            self._receives[number][1].run()


@contextlib.contextmanager
def _named_errors(rank: int, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DeadlineExceeded(
            f"trainer rank {rank} could not {what}: that rank failed, or did not arrive within the process group's "
            f"timeout. Look at its log. The target is only partly written. ({error})"
        ) from error
