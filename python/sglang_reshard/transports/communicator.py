"""Communicators over process groups of our own: broadcasts among engine ranks, messages from trainer to engine ranks.

They are connected over the session's store rather than by `dist.new_group`, so that neither side's own world (its
group names, the order of its collectives) depends on them. Gloo for host memory, NCCL for GPUs.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from sglang_reshard.errors import DeadlineExceeded, ReshardError
from sglang_reshard.transports.abortable_group import AbortableGroup, PeerDisconnected, connect_gloo

PeerBuffer = tuple[int, torch.Tensor]  # peer id of the receiver or sender, and the bytes (1-D, contiguous)
_POLL_S = 0.0002
_ROUNDING_S = 0.01  # gloo counts whole milliseconds
_NO_DEADLINE = float("inf")


class BroadcastCommunicator(AbortableGroup):
    """Broadcasts among `members`, a group of engine ranks."""

    def __init__(
        self, store: dist.Store, members: tuple[int, ...], engine_rank: int, backend: str, timeout_s: float
    ) -> None:
        self.members, self._engine_rank = members, engine_rank
        self._timeout = timedelta(seconds=timeout_s)
        prefixed = dist.PrefixStore(f"{backend}/" + ",".join(map(str, members)), store)
        rank, size = members.index(engine_rank), len(members)
        pg: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            pg = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            pg = connect_gloo(prefixed, rank, size, timeout_s)
        super().__init__(pg, backend, rank, size)

    def broadcast(self, buffer: torch.Tensor, root: int) -> dist.Work:
        """Starts the broadcast of `buffer` (1-D, bytes) from engine rank `root` to all members."""
        options = dist.BroadcastOptions()
        options.rootRank = self.members.index(root)
        options.rootTensor = 0
        options.timeout = self._timeout
        if (pg := self.pg) is None:
            raise self._disconnected("the process group was aborted")
        return pg.broadcast([buffer], options)

    def wait(self, work: dist.Work) -> None:
        """Waits until a broadcast has arrived, or was sent (on a GPU: until the current stream may use the buffer)."""
        on_gpu = self.backend == "nccl"  # where waiting only orders streams
        try:
            self.run_abortable(work.wait if on_gpu else lambda: work.wait(self._timeout))
        except RuntimeError as error:
            raise self._disconnected(str(error)) from error

    def _disconnected(self, why: str) -> PeerDisconnected:
        others = [member for member in self.members if member != self._engine_rank]
        return PeerDisconnected(
            f"engine rank {self._engine_rank} lost its connection to engine ranks {others} in a broadcast; did one of "
            f"them fail? Look at their logs. ({why})"
        )


class BroadcastCommunicators:
    """One engine rank's communicators by their members, connected on first use and reused.

    epoch  distinguishes the instances that share one store, so that none finds what an aborted one left there
    """

    def __init__(self, engine_rank: int, device: torch.device, timeout_s: float, epoch: int) -> None:
        self._epoch = epoch
        self._store: dist.Store | None = None
        self._engine_rank, self._timeout_s = engine_rank, timeout_s
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._connected: dict[tuple[int, ...], BroadcastCommunicator] = {}

    def use_store(self, store: dist.Store) -> None:
        """Sets the store over which communicators connect from now on."""
        self._store = dist.PrefixStore(f"broadcast/{self._epoch}", store)

    def get(self, members: tuple[int, ...]) -> BroadcastCommunicator:
        """Collective: all members must request their communicators in the same order."""
        if members not in self._connected:
            assert self._store is not None
            self._connected[members] = BroadcastCommunicator(
                self._store, members, self._engine_rank, self._backend, self._timeout_s
            )
        return self._connected[members]

    def abort(self) -> None:
        """Ends all of this rank's waits; the communicators cannot be used any more. May be called from any thread."""
        for communicator in list(self._connected.values()):
            communicator.abort()


class PendingOps:
    """Sends or receives in progress. Their buffers must not be touched until `wait` returns."""

    def __init__(self, communicator: P2pCommunicator, verb: str, works: list[tuple[int, dist.Work]]) -> None:
        self._communicator, self._verb, self._works = communicator, verb, works

    def wait(self) -> None:
        """Waits until all have arrived, or were sent (on a GPU: until the current stream may use their buffers).

        Raises DeadlineExceeded after the communicator's `timeout_s`, and PeerDisconnected at once if a connection
        breaks.
        """
        if self._works:
            deadline = time.monotonic() + self._communicator.timeout_s
            self._communicator.run_abortable(lambda: self._wait_for_each(deadline))
            self._works = []
            self._communicator.pending -= 1

    def _wait_for_each(self, deadline: float) -> None:
        for peer, work in self._works:
            with self._communicator.translated_errors(self._verb, peer, deadline):
                self._communicator.wait_for(work, deadline)


class P2pCommunicator(AbortableGroup):
    """Sends and receives messages between trainer ranks and engine ranks.

    A peer id is a trainer rank, or the number of trainer ranks plus an engine rank. Collective over `members`.

    store          the session's
    name           distinguishes the communicators that share one store
    members        the peer ids that participate, ascending
    trainer_ranks  number of trainer ranks, including those that do not participate
    backend        "gloo" or "nccl"
    device         this rank's GPU, for nccl
    timeout_s      seconds that any one wait may last

    `pending` counts the PendingOps that were started and have not completed.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        *,
        peer_id: int,
        members: Sequence[int],
        trainer_ranks: int,
        backend: str,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.timeout_s, self.pending = timeout_s, 0
        self._trainer_ranks = trainer_ranks
        self._name = self._rank_name(peer_id)
        self._group_rank = {member: i for i, member in enumerate(members)}
        rank, size = self._group_rank[peer_id], len(members)
        joined = {member: f"p2p/{name}/joined/{member}" for member in members}
        self._rendezvous(store, joined, peer_id)
        prefixed = dist.PrefixStore(f"p2p/{name}", store)
        try:
            if backend == "nccl":
                pg = _connect_nccl(prefixed, rank, size, device, timeout_s)
            else:
                pg = connect_gloo(prefixed, rank, size, timeout_s)
        except RuntimeError as error:
            others = self._rank_names(member for member in members if member != peer_id)
            raise PeerDisconnected(f"{self._name} could not connect to {others}: {error}") from error
        super().__init__(pg, backend, rank, size)
        store.delete_key(joined[peer_id])  # every member that is connected has seen it

    def send(self, buffers: Sequence[PeerBuffer]) -> PendingOps:
        """Starts sending, one message to each of several peers."""
        return self._start("send", buffers)

    def receive(self, buffers: Sequence[PeerBuffer]) -> PendingOps:
        """Starts receiving, one message from each of several peers. A peer's messages arrive in the order it sends."""
        return self._start("receive", buffers)

    def close(self) -> None:
        """Closes all connections. Peers that wait for this rank fail at once (gloo) or at their deadline (NCCL)."""
        if self.pending:
            self.abort()
        else:
            self.close_idle()

    def run_abortable(self, wait: Callable[[], object]) -> None:
        """Runs `wait`. Raises what it raises, and PeerDisconnected once the communicator is aborted."""
        try:
            super().run_abortable(wait)
        except ReshardError:
            raise
        except RuntimeError as error:
            raise PeerDisconnected(f"{self._name} stopped waiting for P2P messages: {error}") from error

    def wait_for(self, work: dist.Work, deadline: float) -> None:
        """Waits for one operation until `deadline`, a time of the monotonic clock."""
        if self.backend != "nccl":
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            return
        # NCCL's own `wait` only orders streams. Errors are polled, as it is configured not to raise them.
        while not work.is_completed():
            if time.monotonic() >= deadline:
                raise RuntimeError("the GPU had not finished at the deadline")
            self._check_nccl()
            time.sleep(_POLL_S)
        self._check_nccl()
        work.wait()

    @contextlib.contextmanager
    def translated_errors(self, verb: str, peer: int, deadline: float) -> Iterator[None]:
        """Turns the process group's errors into errors that name the peer."""
        try:
            yield
        except RuntimeError as error:
            message = f"{self._name} could not {verb} a message {'from' if verb == 'receive' else 'to'} "
            message += self._rank_name(peer)
            if time.monotonic() >= deadline - _ROUNDING_S:
                raise DeadlineExceeded(
                    f"{message} within {self.timeout_s:.0f} s; is that rank stuck? Look at its log"
                ) from error
            raise PeerDisconnected(
                f"{message}: the connection broke; did that rank fail? Look at its log. ({error})"
            ) from error

    def _start(self, verb: str, buffers: Sequence[PeerBuffer]) -> PendingOps:
        if not buffers:
            return PendingOps(self, verb, [])
        if (pg := self.pg) is None:
            raise PeerDisconnected(f"{self._name} has closed its P2P communicator")
        self.pending += 1
        start = pg.send if verb == "send" else pg.recv
        if self.backend == "nccl":
            with self.translated_errors(verb, buffers[0][0], _NO_DEADLINE):
                # As one NCCL group, within which no order can deadlock, on the communicator of all members.
                pg._start_coalescing()
                for peer, buffer in buffers:
                    start([buffer], self._group_rank[peer], 0)
                return PendingOps(self, verb, [(buffers[0][0], pg._end_coalescing())])
        works = []
        for peer, buffer in buffers:
            with self.translated_errors(verb, peer, _NO_DEADLINE):
                works.append((peer, start([buffer], self._group_rank[peer], 0)))
        return PendingOps(self, verb, works)

    def _rendezvous(self, store: dist.Store, joined: dict[int, str], peer_id: int) -> None:
        """Waits until all members have set their keys, so that an error can name those that have not."""
        store.set(joined[peer_id], "")
        try:
            store.wait(list(joined.values()), timedelta(seconds=self.timeout_s))
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            missing = self._rank_names(member for member, key in joined.items() if not store.check([key]))
            raise DeadlineExceeded(
                f"{self._name} waited {self.timeout_s:.0f} s for {missing} to connect; look at their logs"
            ) from error

    def _check_nccl(self) -> None:
        if (pg := self.pg) is None or pg.get_error() != ErrorType.SUCCESS:
            raise RuntimeError("NCCL reports an error, see the log")

    def _rank_name(self, peer_id: int) -> str:
        engine_rank = peer_id - self._trainer_ranks
        return f"trainer rank {peer_id}" if engine_rank < 0 else f"engine rank {engine_rank}"

    def _rank_names(self, peer_ids: Iterable[int]) -> str:
        return ", ".join(map(self._rank_name, peer_ids))


def _connect_nccl(store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # The communicator's own deadlines expire first: NCCL's watchdog would end the process.
    options._timeout = 10 * timedelta(seconds=timeout_s)
    with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"), torch.cuda.device(device):
        pg: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        pg.eager_connect_single_device(device)
    return pg


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets a variable that torch reads only while a process group is created."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
