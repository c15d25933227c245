"""NCCL process groups, for GPU memory: the only place that makes them.

torch's defaults would end the user's process: a watchdog thread raises when an operation fails or times out, and its
heartbeat monitor aborts the process. They would also change it: the groups of a process share flags and variables. Two
of torch's calls would freeze it: `Work.is_completed` and `ProcessGroupNCCL._comm_ptr` keep Python's interpreter lock
(GIL) while they wait in C++. They are not used here. The code names each function it relies on in torch 2.11
(ProcessGroupNCCL.cpp, NCCLUtils.cpp, init.cpp) and NCCL 2.28.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.routes.wire.ctas import CTAS
from sglang_reshard.routes.wire.recorded_works import RECORDED_WORKS

# Without a watchdog and its monitor, which are started unless waits block (`ProcessGroupNCCL::ProcessGroupNCCL`).
# Work is then never enqueued for them either (`workEnqueue`): nobody but this module looks at errors. torch offers no
# option for it, so that a group that another thread makes within the same constructor call has no watchdog either.
_WITHOUT_WATCHDOG = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
# `ProcessGroupNCCL::abort` raises a flag that all groups share if this is set, and then the monitor of the process's
# first group, the user's, ends the process (`dumpExtraDebuggingInfo`, `HeartbeatMonitor::runLoop`).
_WITHOUT_DUMP = {"TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "0"}
_ABORT_S = 1.0  # kernels poll NCCL's abort flag all the time
_environment_lock = threading.Lock()


class NcclGroup:
    """One rank's end of an NCCL communicator; see `communicator.ProcessGroup`.

    No call keeps the GIL while it waits: torch's bindings release it in all that are made here. So other threads of the
    process go on, the one that aborts among them.

    The communicator is non-blocking. Only then is `ncclCommAbort` defined while another thread is within a call: it
    joins the thread of NCCL's that executes the call, before it frees what that uses (`ncclCommEnsureReady`). torch
    waits for such a call in the thread that made it, and so every thread here may be left behind.

    Operations are started in separate threads for another reason, too. When a group of NCCL's calls fails, torch and
    NCCL leave the thread within it (`ncclActiveGroupCounter_`, `ncclGroupDepth` are the thread's): from a trainer's own
    thread, no further collective would be launched.
    """

    interface_variable = "NCCL_SOCKET_IFNAME"
    starts_at_once = False

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        _address: str = "",
        at_once: int = 1,
    ) -> None:
        """Makes nothing yet. NCCL finds its interface itself.

        device   this rank's GPU
        at_once  communicators of this rank that are used at the same time as this one, itself included
        """
        self._store, self._rank, self._size, self._device = store, rank, size, device
        self._timeout_s, self._at_once = timeout_s, at_once
        self._lock, self._aborted = threading.Lock(), False
        self._pg: Any = None

    def adopt_stream(self) -> Callable[[], None]:
        """NCCL's stream waits for the current one of the thread that starts an operation (`syncStream`)."""
        return runtime().adopt_stream(self._device)

    def connect(self) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        options.config.blocking = 0
        options.config.max_ctas = CTAS.agree(self, self._device, self._at_once, self._store, self._rank, self._size)
        with changed_environment(_WITHOUT_WATCHDOG):
            pg: Any = dist.ProcessGroupNCCL(self._store, self._rank, self._size, options)
        with self._lock:
            self._pg = pg
        if not self._aborted:
            pg.eager_connect_single_device(self._device)  # returns while NCCL connects in a thread of its own
        if self._aborted:
            self._abort(pg, ())
            raise _aborted()
        # The first operation waits until NCCL has connected all members, and keeps all others from the communicator
        # meanwhile, `abort` too (`NCCLComm::getNcclComm`, `waitReady`). So first wait, abortably, until all have come.
        if self._store.add("entered", 1) == self._size:
            self._store.set("all_entered", "")
        self._store.wait(["all_entered"])
        self._send_to_itself()

    def _send_to_itself(self) -> None:
        """Waits until NCCL has connected all members. Two GPUs are connected when one first sends to the other."""
        sent, received = torch.zeros(2, dtype=torch.uint8, device=self._device).split(1)
        with self._coalesced() as works:
            self._pg.send([sent], self._rank, 0)
            self._pg.recv([received], self._rank, 0)
        self.wait(works[0], time.monotonic() + self._timeout_s)

    def start(self, verb: str, messages: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[tuple[int, ...], dist.Work]]:
        """Starts all as one NCCL group, within which no order can deadlock."""
        start = self._pg.send if verb == "send" else self._pg.recv
        with self._coalesced() as works:  # else each pair of ranks would be serialized with all others (`pointToPoint`)
            for peer, buffer in messages:
                start([buffer], peer, 0)
        return [(tuple(peer for peer, _ in messages), works[0])]

    def broadcast(self, buffer: torch.Tensor, root: int) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        with self._coalesced() as works:
            self._pg.broadcast([buffer], options)
        return works[0]

    @contextlib.contextmanager
    def _coalesced(self) -> Iterator[list[dist.Work]]:
        """Starts the operations of the block as one; the list has its work in this case.

        That work refers to no tensor once it was waited for (`endCoalescing`, `synchronizeStream`), so that it can be
        kept for torch's flight recorder without the memory of its message.
        """
        works = list[dist.Work]()
        self._pg._start_coalescing()
        yield works
        works.append(self._pg._end_coalescing())
        RECORDED_WORKS.append(works[0])

    def wait(self, work: dist.Work, deadline: float) -> None:
        """Waits until it has ended, has failed, or is aborted. The thread that waits for this one checks the deadline.

        The group's waits block (`_WITHOUT_WATCHDOG`): `WorkNCCL::wait` polls the end of the kernel and NCCL's errors in
        C++, and its binding has released the GIL. Before that it lets the thread's stream wait for the kernel. On the
        trainer's own, its next step would wait too, and if its collectives come in between, ranks wait in a circle.
        """
        # torch counts from the start of the operation, and would abort the communicator itself: not before `deadline`.
        longest = max(0.0, deadline - time.monotonic()) + self._timeout_s
        with runtime().waiting_stream(self._device):
            work.wait(timedelta(seconds=longest))  # raises the error of an operation that failed
        if self._aborted:  # its kernel has ended, too
            raise _aborted()

    def abort(self, pending: tuple[object, ...]) -> None:
        """Ends this rank's kernels and calls. Returns before all is freed, as that lasts until peers abort, too.

        NCCL's threads serve the ranks of a host until each of these has aborted or died (`ncclProxyService`). `pending`
        is kept until then: should a kernel not end, then its buffers are not reused under it.
        """
        self._end(pending, _ABORT_S)

    def close(self) -> None:
        # Not `shutdown`, which waits for all ranks of the host. Ranks that close have all that was sent to them.
        self._end((), 0.0)

    def _end(self, pending: tuple[object, ...], wait_s: float) -> None:
        with self._lock:
            self._aborted, pg = True, self._pg
        CTAS.release(self)
        if pg is None:
            return
        thread = threading.Thread(target=self._abort, args=(pg, pending), name="sglang-reshard NCCL abort", daemon=True)
        # Read by `abort` before all else. Mostly not set, and so nothing is changed.
        dumps = any(os.environ.get(name, "0") != value for name, value in _WITHOUT_DUMP.items())
        with changed_environment(_WITHOUT_DUMP) if dumps else contextlib.nullcontext():
            thread.start()
            thread.join(_ABORT_S if dumps else wait_s)

    @staticmethod
    def _abort(pg: Any, _pending: tuple[object, ...]) -> None:
        with contextlib.suppress(RuntimeError):  # it took longer than the group's timeout
            pg.abort()


def _aborted() -> RuntimeError:
    return RuntimeError("the process group was aborted")


@contextlib.contextmanager
def changed_environment(changes: dict[str, str]) -> Iterator[None]:
    """Changes variables that torch reads while a process group is made; one thread at a time, then all is as before."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in changes}
        try:
            os.environ.update(changes)
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
