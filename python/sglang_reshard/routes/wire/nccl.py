"""NCCL process groups, for GPU memory: the only place that makes them.

torch's defaults would end the user's process: a watchdog thread raises when an operation fails or times out, and its
heartbeat monitor aborts the process. They would also change it: the groups of a process share flags and variables.
What is relied on here is named with its function in torch 2.11 (ProcessGroupNCCL.cpp, NCCLUtils.cpp) and NCCL 2.28.
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

INTERFACE_VARIABLE = "NCCL_SOCKET_IFNAME"
# Without a watchdog and its monitor, which are started unless waits block (`ProcessGroupNCCL::ProcessGroupNCCL`).
# Work is then never enqueued for them either (`workEnqueue`): nobody but this module looks at errors.
_WITHOUT_WATCHDOG = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
# `ProcessGroupNCCL::abort` raises a flag that all groups share if this is set, and then the monitor of the process's
# first group, the user's, ends the process (`dumpExtraDebuggingInfo`, `HeartbeatMonitor::runLoop`).
_WITHOUT_DUMP = {"TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "0"}
# Thread blocks (CTAs) of one communicator. Several are in use at a time: of one transfer, or of several engines that
# are updated at once. All of their kernels must find room on a GPU together (132 SMs on an H100), because then the
# order in which they were launched, which differs from rank to rank, cannot make them wait for each other.
_MAX_CTAS = 16
_ABORT_S = 1.0  # kernels poll NCCL's abort flag all the time
_POLL_S = 0.0002
_environment_lock = threading.Lock()


class NcclGroup:
    """One rank's end of an NCCL communicator; see `abortable_group.ProcessGroup`.

    The communicator is non-blocking. Only then is `ncclCommAbort` defined while another thread is within a call: it
    joins the thread of NCCL's that executes the call, before it frees what that uses (`ncclCommEnsureReady`). torch
    waits for such a call in the thread that made it, and so every thread here may be left behind.

    Operations are started in threads of their own for another reason, too. When a group of NCCL's calls fails, torch
    and NCCL leave the thread within it (`ncclActiveGroupCounter_`, `ncclGroupDepth` are the thread's): from a trainer's
    own thread, no collective would be launched any more.
    """

    starts_at_once = False

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float, _address: str = ""
    ) -> None:
        """`device` is this rank's GPU. Nothing is connected yet. NCCL finds its interface itself."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.config.blocking = 0
        options.config.max_ctas = _MAX_CTAS
        with changed_environment(_WITHOUT_WATCHDOG):
            self._pg: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        self._store, self._size, self._device = store, size, device
        self._aborted = False

    def adopt_stream(self) -> Callable[[], None]:
        """NCCL's stream waits for the current one of the thread that starts an operation (`syncStream`)."""
        return runtime().adopt_stream(self._device)

    def connect(self) -> None:
        self._pg.eager_connect_single_device(self._device)  # returns while NCCL connects in a thread of its own
        if self._aborted:
            self._abort(())
            raise RuntimeError("the process group was aborted")
        # To find out whether NCCL is done, torch waits for it, and keeps all others from the communicator meanwhile,
        # `abort` too (`NCCLComm::getNcclComm`, `waitReady`). So first wait, abortably, until all members have come.
        if self._store.add("entered", 1) == self._size:
            self._store.set("all_entered", "")
        self._store.wait(["all_entered"])
        self._pg._comm_ptr()

    def start(self, verb: str, messages: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[tuple[int, ...], dist.Work]]:
        """Starts all as one NCCL group, within which no order can deadlock."""
        start = self._pg.send if verb == "send" else self._pg.recv
        self._pg._start_coalescing()  # else each pair of ranks would be serialized with all others (`pointToPoint`)
        for peer, buffer in messages:
            start([buffer], peer, 0)
        return [(tuple(peer for peer, _ in messages), self._pg._end_coalescing())]

    def broadcast(self, buffer: torch.Tensor, root: int) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        work: dist.Work = self._pg.broadcast([buffer], options)
        return work

    def wait(self, work: dist.Work, deadline: float) -> None:
        # `Work.wait` blocks until the group's timeout. `is_completed` also returns True for an operation that failed
        # (`WorkNCCL::isCompleted`), and for the kernel of one that was aborted. No other may be started meanwhile:
        # torch would remember that NCCL is in progress, and see no error any more (`NCCLComm::checkForNcclError`).
        while not work.is_completed():
            if time.monotonic() >= deadline:
                raise RuntimeError("the GPU had not finished at the deadline")
            time.sleep(_POLL_S)
        if self._aborted:
            raise RuntimeError("the process group was aborted")
        work.wait()  # raises the error of an operation that failed

    def abort(self, pending: tuple[object, ...]) -> None:
        """Ends this rank's kernels and calls. Returns before all is freed, as that lasts until peers abort, too.

        NCCL's threads serve the ranks of a host until each of these has aborted or died (`ncclProxyService`). `pending`
        is kept until then: should a kernel not end, then its buffers are not reused under it.
        """
        self._end(pending).join(_ABORT_S)

    def close(self) -> None:
        # Not `shutdown`, which waits for all ranks of the host. Ranks that close have all that was sent to them.
        self._end(())

    def _end(self, pending: tuple[object, ...]) -> threading.Thread:
        self._aborted = True
        thread = threading.Thread(target=self._abort, args=(pending,), name="sglang-reshard NCCL abort", daemon=True)
        # Read by `abort` before all else. Mostly not set, and so nothing is changed.
        dumps = any(os.environ.get(name, "0") != value for name, value in _WITHOUT_DUMP.items())
        with changed_environment(_WITHOUT_DUMP) if dumps else contextlib.nullcontext():
            thread.start()
            if dumps:
                thread.join(_ABORT_S)
        return thread

    def _abort(self, _pending: tuple[object, ...]) -> None:
        with contextlib.suppress(RuntimeError):  # it took longer than the group's timeout
            self._pg.abort()


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
