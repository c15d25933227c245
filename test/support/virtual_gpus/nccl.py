"""torch's ProcessGroupNCCL for virtual GPUs: what it forgives, what it hangs on, and what it ends a process for.

- construction lasts until all members have come, and is ended by nothing but `abort`
- `is_completed` and `_comm_ptr` keep Python's interpreter lock while they wait: the process stands still, for real, and
  a rule is broken. All other calls wait without it
- calls hold the communicator's lock while they wait for its construction, and so does an abort, which waits for the
  other members of the host to abort or to die. (torch 2.11 gives the lock back before that last wait, if the group
  aborts; an operation that has failed aborts with the lock.)
- a GPU twice in one communicator, settings that differ between members of a host, and limits of thread blocks that
  differ between any members are broken rules
- buffers are GPU memory that this process has allocated on its own GPU
- communicators that are in use at once must find room on a GPU together: the order of their operations differs
- operations begin in their order and end later; `wait` of one that has not ended is not bounded by anything, and makes
  the thread's stream wait, too, which must not be the default one: others compute there
- an operation that lasts longer than the group's timeout, or a peer that dies, ends the process, unless the group was
  made without a watchdog (TORCH_NCCL_BLOCKING_WAIT=1, or TORCH_NCCL_ASYNC_ERROR_HANDLING=0): then only `wait` ends

Messages travel as files.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from support.virtual_gpus.description import Place, VirtualGpus
from support.virtual_gpus.journal import Journal
from support.virtual_gpus.memory import VirtualMemory

ENDED_BY_WATCHDOG = 86  # exit code
SETTINGS = (
    "NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE",
)  # fmt: skip
CTAS = 132  # thread blocks that run on an H100 at once; operations that find no room wait for others to end
DEFAULT_CTAS = 32  # of a communicator that is not limited
FROZEN_S = 3.0  # for as long a call keeps the interpreter's lock that would keep it until other processes do something
_POLL_S = 0.001
_LATENCY_S = 0.002
_Options = dist.ProcessGroupNCCL.Options


_with_interpreter_lock = ctypes.PyDLL(None)  # the functions of a PyDLL keep it, those of a CDLL give it back


class _Aborted(Exception):
    pass


class VirtualNccl:
    """NCCL of one process."""

    def __init__(self, gpus: VirtualGpus, place: Place, memory: VirtualMemory, journal: Journal, cuda: Any) -> None:
        self.gpus, self.place, self.memory, self.journal, self.cuda = gpus, place, memory, journal, cuda
        self.lock, self.in_use = threading.Lock(), dict[int, int]()  # thread blocks of the operations in progress
        self.folder = Path(gpus.folder, "nccl")
        self.folder.mkdir(exist_ok=True)

    def install(self) -> None:
        nccl = self

        class ProcessGroupNCCL(VirtualProcessGroup):
            def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
                super().__init__(nccl, store, rank, size, options or _Options())

        dist.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc,assignment]
        torch.distributed.distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]

    def freeze(self, what: str) -> None:
        """Keeps the interpreter's lock, so that no thread of this process runs. Then the test's end is in sight."""
        self.journal.broken(f"{what}, and kept the interpreter's lock meanwhile: the process stood still")
        _with_interpreter_lock.usleep(int(FROZEN_S * 1e6))

    def checked(self, buffer: torch.Tensor) -> torch.Tensor:
        found = self.memory.find(buffer.data_ptr())
        if found is None:
            raise self.journal.broken("NCCL was given host memory")
        if found.mapped or found.number != self.place.number:
            raise self.journal.broken(f"NCCL was given memory of GPU {found.number}, which is not this rank's own")
        if not buffer.is_contiguous():
            raise self.journal.broken("NCCL was given a tensor that is not contiguous")
        return buffer


class VirtualWork:
    """An operation that was given to a group."""

    def __init__(self, group: VirtualProcessGroup) -> None:
        self._group: VirtualProcessGroup | None = group  # torch's refers to the communicator alone
        self._nccl, self._mutex, self._ended = group.nccl, group.mutex, threading.Event()
        self.error: Exception | None = None
        self.begun = time.monotonic()

    def end(self, error: Exception | None = None) -> None:
        self._nccl.in_use.pop(id(self), None)
        self.error = error
        self._ended.set()
        self._group = None

    def is_completed(self) -> bool:
        """Its binding keeps the interpreter's lock, and it needs the communicator's (`NCCLComm::isAborted`)."""
        if not self._mutex.acquire(blocking=False):
            self._nccl.freeze("Work.is_completed waited for another call of its communicator")
            self._mutex.acquire()
        self._mutex.release()
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self.error is None

    def exception(self) -> Exception | None:
        return self.error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if (group := self._group) is not None:
            self._block_stream()
            if not group.waits_on_host and not timeout:
                raise group.nccl.journal.broken("an operation of NCCL was waited for before it had ended: no deadline")
            limit = timeout.total_seconds() or group.timeout_s
            while not self._has_ended():
                if time.monotonic() - self.begun > limit:
                    group.abort_under_lock()
                    raise dist.DistBackendError(f"Watchdog caught collective operation timeout: ran for {limit} s")
                time.sleep(_POLL_S)
        if self.error is not None:
            raise dist.DistBackendError(f"NCCL error: {self.error}")
        return True

    def _has_ended(self) -> bool:
        with self._mutex:
            return self._ended.is_set()

    def _block_stream(self) -> None:
        """`WorkNCCL::synchronizeStream`."""
        cuda = self._nccl.cuda
        if cuda.current_stream() == cuda.default_stream():
            self._nccl.journal.broken(
                "the default stream was made to wait for an operation of NCCL that had not ended, and with it whatever "
                "the process computes next"
            )


_Step = Callable[[], bool]  # goes on with an operation as far as it can now; returns whether it has ended


class VirtualProcessGroup:
    """One rank's end. Its thread makes the communicator, and then executes what it is given."""

    Options = _Options

    def __init__(self, nccl: VirtualNccl, store: Any, rank: int, size: int, options: Any) -> None:
        self.nccl, self._store, self._rank, self._size = nccl, store, rank, size
        self.timeout_s: float = options._timeout.total_seconds()
        self.waits_on_host = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") == "1"
        handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0"
        self._has_watchdog = handling and not self.waits_on_host
        self._blocking = options.config.blocking != 0
        self._ctas = options.config.max_ctas if options.config.max_ctas > 0 else DEFAULT_CTAS
        self._settings = {name: os.environ.get(name, "") for name in SETTINGS}
        self._ready, self._aborted, self._begun = threading.Event(), threading.Event(), False
        self.mutex = threading.RLock()  # `NCCLComm::mutex_`
        self._error = ErrorType.SUCCESS
        self._given: queue.Queue[tuple[VirtualWork, list[_Step]]] = queue.Queue()
        self._together: list[_Step] | None = None
        self._sequence: dict[tuple[str, int, int], int] = {}
        self._name, self._pids = "", dict[int, int]()

    # -- the communicator

    def eager_connect_single_device(self, device: torch.device) -> None:
        if self.nccl.cuda._number(device) != self.nccl.place.number:
            raise self.nccl.journal.broken(f"a communicator was made on {device}, which is not this rank's own GPU")
        self._begin()
        if self._blocking:
            self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        while not self._ready.wait(_POLL_S):
            if self._aborted.is_set():
                raise dist.DistBackendError("NCCL error: the communicator was aborted")
        self._raise_error()

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        if self._rank == 0:
            self._name = uuid.uuid4().hex
            (self.nccl.folder / self._name).mkdir()
            self._store.set("virtual_nccl_id", self._name)
        else:
            self._name = bytes(self._store.get("virtual_nccl_id")).decode()
        place, gpus = self.nccl.place, self.nccl.gpus
        card = {
            "gpu": gpus.uuid(place.host, place.number),
            "settings": self._settings,
            "ctas": self._ctas,
            "pid": os.getpid(),
            "host": place.host,
        }
        _write(self._file(str(self._rank)), json.dumps(card).encode())
        threading.Thread(target=self._run, name="virtual NCCL", daemon=True).start()

    def _join(self) -> None:
        files = [self._file(str(rank)) for rank in range(self._size)]
        self._until(lambda: all(f.exists() for f in files))
        cards = [json.loads(f.read_bytes()) for f in files]
        self._pids = {rank: card["pid"] for rank, card in enumerate(cards)}
        if len(limits := {card["ctas"] for card in cards}) > 1:
            self.nccl.journal.broken(f"limits of thread blocks differ between members, which hangs: {sorted(limits)}")
            self._until(lambda: False)
        on = [card["gpu"] for card in cards]
        if twice := sorted({gpu for gpu in on if on.count(gpu) > 1}):
            self._error = ErrorType.COMM_ERROR
            raise self.nccl.journal.broken(f"GPU {twice[0]} is twice in one communicator: ranks on {on}")
        here = [card["settings"] for card in cards if card["host"] == self.nccl.place.host]
        if any(settings != self._settings for settings in here):
            self.nccl.journal.broken(f"NCCL's settings differ between members of a host, which hangs: {here}")
            self._until(lambda: False)
        self.nccl.journal.note("communicator", rank=self._rank, gpus=on, ctas=self._ctas)

    def _is_initialized(self) -> bool:
        return self._ready.is_set() and self._error == ErrorType.SUCCESS

    def _comm_ptr(self) -> int:
        """Waits for the communicator: in C, so that no deadline reaches it, and with the interpreter's lock."""
        if not self._ready.is_set():
            self.nccl.freeze("ProcessGroupNCCL._comm_ptr waited for NCCL to connect")
        self._await_communicator()
        return id(self)

    def _await_communicator(self) -> None:
        """`NCCLComm::getNcclComm`: an abort has to wait for it."""
        with self.mutex:
            if self._aborted.is_set():
                raise dist.DistBackendError("NCCL communicator was aborted")
            while not self._ready.wait(_POLL_S):
                pass
            self._raise_error()

    def abort(self) -> None:
        """Raises if it lasts longer than the group's timeout. Its thread goes on then, and keeps the lock."""
        thread = threading.Thread(target=self.abort_under_lock, name="virtual NCCL abort", daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        if thread.is_alive():
            raise dist.DistBackendError("Future for ProcessGroup abort timed out")

    def abort_under_lock(self) -> None:
        with self.mutex:
            self._leave()
            while any(self._serves(rank) for rank in range(self._size)):
                time.sleep(_POLL_S)

    def _leave(self) -> None:
        """Ends the kernels. Peers of this host need not wait for this member any more."""
        self._aborted.set()
        if self._name:
            self._file(f"left-{self._rank}").touch()

    def _serves(self, rank: int) -> bool:
        """`ncclProxyService`: whether a member of this host, if it has come, has neither aborted nor died."""
        with contextlib.suppress(FileNotFoundError):
            if not self._name or self._file(f"left-{rank}").exists():
                return False
            card = json.loads(self._file(str(rank)).read_bytes())
            return card["host"] == self.nccl.place.host and Path(f"/proc/{card['pid']}/fd").exists()
        return False

    def __del__(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._leave()

    # -- operations

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> VirtualWork | None:
        return self._give([self._sending(self.nccl.checked(tensors[0]), to)])

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> VirtualWork | None:
        return self._give([self._receiving(self.nccl.checked(tensors[0]), source)])

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> VirtualWork | None:
        buffer, root = self.nccl.checked(tensors[0]), options.rootRank
        if root != self._rank:
            return self._give([self._receiving(buffer, root)])
        return self._give([self._sending(buffer, other) for other in range(self._size) if other != root])

    def _start_coalescing(self) -> None:
        self._together = []

    def _end_coalescing(self, *_: Any) -> VirtualWork | None:
        steps, self._together = self._together, None
        assert steps is not None
        return self._give(steps)

    def _give(self, steps: list[_Step]) -> VirtualWork | None:
        if self._together is not None:
            self._together += steps
            return None
        self._begin()  # a communicator that was not made before is made now
        self._await_communicator()
        work = VirtualWork(self)
        after = self.nccl.cuda.current_stream().point  # NCCL's own stream waits for it
        steps.insert(0, lambda: self.nccl.memory.streams.finish(after) is None)
        with self.nccl.lock:
            self.nccl.in_use[id(work)] = self._ctas
            if sum(self.nccl.in_use.values()) > CTAS:
                self.nccl.journal.broken(
                    f"communicators in use at once have {[*self.nccl.in_use.values()]} CTAs of {CTAS}"
                )
        self._given.put((work, steps))
        return work

    def _sending(self, buffer: torch.Tensor, to: int) -> _Step:
        path = self._message("send", self._rank, to)
        written = False

        def step() -> bool:
            nonlocal written
            if not written:
                written = True
                _write(path(), bytes(buffer.view(torch.uint8).numpy()))
            return not path().exists()  # the receiver has taken it

        return step

    def _receiving(self, buffer: torch.Tensor, source: int) -> _Step:
        path = self._message("receive", source, self._rank)

        def step() -> bool:
            if not path().exists():
                return False
            data = path().read_bytes()
            if len(data) != buffer.nbytes:
                raise self.nccl.journal.broken(f"{buffer.nbytes} bytes were to be received, and {len(data)} were sent")
            buffer.view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            path().unlink()
            return True

        return step

    def _message(self, verb: str, source: int, to: int) -> Callable[[], Path]:
        link = verb, source, to
        number = self._sequence[link] = self._sequence.get(link, 0) + 1
        return lambda: self._file(f"{source}-{to}-{number}")

    # -- its thread

    def _run(self) -> None:
        try:
            self._join()
            self._ready.set()
            while True:
                work, steps = self._next()
                time.sleep(_LATENCY_S)
                while steps := [step for step in steps if not step()]:
                    self._until(lambda: True, work)
                    time.sleep(_POLL_S)
                work.end()
        except _Aborted:
            error: Exception = RuntimeError("the communicator was aborted")
        except Exception as failure:
            error = failure
        self._ready.set()
        if self._error == ErrorType.SUCCESS:
            self._error = ErrorType.COMM_ERROR
        with contextlib.suppress(UnboundLocalError):
            work.end(error)
        while not self._given.empty():
            self._given.get()[0].end(error)

    def _next(self) -> tuple[VirtualWork, list[_Step]]:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._given.get(timeout=0.02)
            if self._aborted.is_set():
                raise _Aborted

    def _until(self, done: Callable[[], bool], work: VirtualWork | None = None) -> None:
        """Polls. Raises _Aborted, and what becomes of an operation that lasts too long or has lost its peer."""
        while True:
            if self._aborted.is_set():
                raise _Aborted
            if work is not None:
                if self._has_watchdog and time.monotonic() - work.begun > self.timeout_s:
                    self._fail(ErrorType.TIMEOUT, f"an operation took longer than {self.timeout_s} s")
                if lost := [r for r, pid in self._pids.items() if not Path(f"/proc/{pid}/fd").exists()]:
                    self._fail(ErrorType.REMOTE_ERROR, f"the connection to ranks {lost} is lost")
            if done():
                return
            time.sleep(_POLL_S)

    def _fail(self, kind: ErrorType, why: str) -> None:
        if self._has_watchdog:
            self.nccl.journal.broken(f"NCCL's watchdog ended the process: {why}")
            os._exit(ENDED_BY_WATCHDOG)
        self._error = kind
        raise RuntimeError(why)

    def _raise_error(self) -> None:
        if self._error != ErrorType.SUCCESS:
            raise dist.DistBackendError(f"NCCL error: {self._error}")

    def _file(self, name: str) -> Path:
        return self.nccl.folder / self._name / name


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(data)
    partial.rename(path)
