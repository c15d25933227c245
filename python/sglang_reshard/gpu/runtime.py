"""Answers the package's questions about GPUs: whether memory is on one, its handles, devices and streams.

`runtime()` returns the process's CudaRuntime. Tests of the rules of GPUs replace it by one of virtual GPUs (`use`).
`rank_device` returns what a rank announces of its GPU.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.driver import DriverError, cuda_driver
from sglang_reshard.gpu.nccl_settings import nccl_settings
from sglang_reshard.gpu.nvml import nvlink_domain
from sglang_reshard.gpu.rank_info import RankGpuInfo


class Allocation(NamedTuple):
    """GPU memory that one handle refers to: first address, bytes, and an id that no other allocation gets.

    The id tells memory that was freed and allocated again at the same address.
    """

    base: int
    nbytes: int
    id: int


class CudaRuntime:
    """GPUs as CUDA has them. Every method names the device that it means: none depends on the thread's current one."""

    def __init__(self) -> None:
        self._own_streams: dict[torch.device, torch.cuda.Stream] = {}
        self._waiting_streams: dict[torch.device, torch.cuda.Stream] = {}
        self._streams_lock = threading.Lock()

    def is_gpu(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def on_gpu(self, memory: torch.Tensor | torch.UntypedStorage) -> bool:
        return memory.device.type == "cuda"

    def uses_gpu(self) -> bool:
        """Returns whether this process has used a GPU."""
        return torch.cuda.is_initialized()

    def used_devices(self) -> list[torch.device]:
        """Returns the GPUs on which this process has a context, on which work may be under way."""
        if not self.uses_gpu():
            return []
        has_context: Any = getattr(torch._C, "_cuda_hasPrimaryContext")  # noqa: B009 (only in torch built for CUDA)
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count()) if has_context(index)]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def uuid(self, device: torch.device) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)

    def current_device(self) -> torch.device:
        """Returns the calling thread's."""
        return torch.device("cuda", torch.cuda.current_device())

    def multiprocessors(self, device: torch.device) -> int:
        """Returns the number of multiprocessors (SMs)."""
        return int(torch.cuda.get_device_properties(device).multi_processor_count)

    def fabric(self, device: torch.device) -> str:
        """Returns a name of the NVLink domain of several hosts that the GPU is in; empty for none."""
        return nvlink_domain(self.uuid(device))

    def visible(self) -> tuple[str, ...]:
        """Returns the UUIDs of the GPUs that this process sees, by index."""
        return tuple(self.uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))

    def allocator(self) -> str:
        """Returns the kind of memory that torch allocates now: "native", "expandable_segments" or "cudaMallocAsync"."""
        backend = str(torch.cuda.get_allocator_backend())
        if backend != "native":
            return backend
        settings = torch.cuda.memory._snapshot()["allocator_settings"]  # the environment does not have later changes
        return "expandable_segments" if settings["expandable_segments"] else backend

    def nccl_version(self) -> str:
        return ".".join(map(str, torch.cuda.nccl.version()))

    # -- memory of this process, for others

    def allocation(self, address: int, device: torch.device) -> Allocation:
        """Returns the allocation that `address` lies in. Raises Unsupported for memory that has no handles."""
        with _context(device), _translated("its GPU memory cannot be shared"):
            driver = cuda_driver()
            if not driver.has_handle(address):
                raise Unsupported(
                    "its GPU memory has no CUDA IPC handle: expandable segments, cudaMallocAsync and virtual memory "
                    "pools have none. Unset PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or use transport='p2p'"
                )
            return Allocation(*driver.allocation(address))

    def export_handle(self, allocation: Allocation, device: torch.device) -> bytes:
        with _context(device), _translated("its GPU memory cannot be shared"):
            return cuda_driver().export_handle(allocation.base)

    def frees(self, device: torch.device) -> int | None:
        """Returns how often torch's allocator has returned memory to the GPU; None if it does not count that.

        While the number stays the same, no memory of a storage that is still there has become another allocation.
        """
        try:
            found = torch.cuda.memory.memory_stats_as_nested_dict(device).get("num_device_free")
        except RuntimeError:  # pluggable allocators
            return None
        return None if found is None else int(found)

    def filled(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns a copy of host memory in memory of torch's allocator. It has ended: others may read it."""
        found = values.to(device)
        torch.cuda.current_stream(device).synchronize()
        return found

    # -- memory of other processes

    def open_handles(self, handles: Sequence[bytes], device: torch.device) -> list[int]:
        """Maps allocations of other processes for `device`, which need not see the GPUs that they are on.

        Returns their addresses here. Raises Unsupported if `device` cannot reach one of the GPUs; in this case none is
        mapped.
        """
        opened: list[int] = []
        with _context(device), _translated("GPU memory cannot be mapped"):
            try:
                for handle in handles:
                    opened.append(cuda_driver().open_handle(handle))  # noqa: PERF401 (known if a later one fails)
            except BaseException:
                _close(opened)
                raise
        return opened

    def close_handles(self, addresses: Sequence[int], device: torch.device) -> None:
        """Unmaps them. All that was started on `device` must have ended."""
        if addresses:
            with _context(device):
                _close(addresses)

    def storage(self, address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Returns mapped memory as a storage on `device`. It does not own the memory."""
        found: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)  # its stub is wrong
        return found

    def register_host(self, address: int, nbytes: int, device: torch.device) -> bool:
        """Makes read-only host memory readable by kernels, at the same address. Returns False if the host cannot."""
        try:
            with _context(device):
                cuda_driver().register_host(address, nbytes)
        except (DriverError, OSError):
            return False
        return True

    def unregister_host(self, address: int, device: torch.device) -> None:
        """Undoes it. All that was started on `device` must have ended."""
        with _context(device), contextlib.suppress(DriverError):
            cuda_driver().unregister_host(address)

    # -- kernels

    def reachable_by_kernels(self, memory: torch.Tensor, device: torch.device) -> bool:
        """Returns whether kernels on `device` can use the addresses of `memory`: its own, and pinned host memory."""
        if self.on_gpu(memory):
            return memory.device == device  # mapped memory of other processes is the device's, too
        try:
            with torch.cuda.device(device):
                return cuda_driver().is_seen_by_kernels(memory.data_ptr())
        except (DriverError, OSError):
            return False

    def using(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Makes `device` the current one for a block that launches kernels."""
        return torch.cuda.device(device)

    # -- devices and streams

    def synchronize(self, devices: Iterable[torch.device]) -> None:
        """Waits until all that was started on these devices has ended; devices that are no GPU are skipped."""
        for device in set(devices):
            if self.is_gpu(device):
                torch.cuda.synchronize(device)

    def synchronize_stream(self, device: torch.device) -> None:
        """Waits until all that the calling thread has started in its current stream of a GPU has ended."""
        if self.is_gpu(device):
            torch.cuda.current_stream(device).synchronize()

    def event(self, device: torch.device) -> torch.cuda.Event:
        """Returns an event after all that the calling thread has started in its current stream of a GPU."""
        with torch.cuda.device(device):
            event = torch.cuda.Event(blocking=True)  # waiting for it takes no core
            event.record(torch.cuda.current_stream(device))
        return event

    def spare_captures(self) -> None:
        """Lets the calling thread use CUDA while others capture graphs; by default that would break their captures.

        Its launches do not become part of a capture. It must not wait for whole devices, which breaks captures anyway.
        """
        if self.uses_gpu():
            with contextlib.suppress(DriverError, OSError):
                cuda_driver().relax_capture_mode()

    @contextlib.contextmanager
    def own_stream(self, device: torch.device) -> Iterator[None]:
        """Runs the block in a separate stream, after all earlier work on `device`; waits for it at the end.

        It waits also if the block fails: memory that is freed then must not be reused under the block's kernels.
        """
        if not self.is_gpu(device):
            yield
            return
        with torch.cuda.device(device):  # a new thread starts at GPU 0
            torch.cuda.synchronize(device)  # it cannot know on which stream its memory was written and allocated
            if device not in self._own_streams:  # torch's allocator keeps the memory of each stream apart
                self._own_streams[device] = torch.cuda.Stream(device)
            stream = self._own_streams[device]
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                stream.synchronize()

    def adopt_stream(self, device: torch.device) -> Callable[[], None]:
        """Returns a call that makes another thread use this one's current stream, until that thread ends."""
        stream = torch.cuda.current_stream(device)

        def adopt() -> None:  # not as a context, whose end would go back to GPU 0, and make a context there
            torch.cuda.set_device(device)
            torch.cuda.set_stream(stream)
            self.spare_captures()

        return adopt

    def waiting_stream(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Makes a stream the thread's current one that is given nothing to compute, for a block that only waits.

        Its priority is high: so it shares no queue with the default stream, which with CUDA_DEVICE_MAX_CONNECTIONS=1
        would wait behind it. No GPU has shown that yet.
        """
        with self._streams_lock:
            if device not in self._waiting_streams:
                self._waiting_streams[device] = torch.cuda.Stream(device, priority=-1)
        return torch.cuda.stream(self._waiting_streams[device])

    def free_bytes(self, device: torch.device) -> int:
        """Returns the bytes that can be allocated, including unused memory of torch's allocator."""
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def trim(self, device: torch.device) -> None:
        """Returns memory that torch's allocator keeps unused to the GPU."""
        if self.is_gpu(device):
            with torch.cuda.device(device):
                torch.cuda.empty_cache()

    # -- figures for reports

    def start_peak(self, device: torch.device) -> int:
        """Starts to measure the peak of torch's allocator. Returns the bytes that are allocated now."""
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)

    def peak_bytes(self, device: torch.device) -> int:
        return torch.cuda.max_memory_allocated(device)

    def foreign_bytes(self, device: torch.device) -> int:
        """Returns the memory of the GPU that is used, but not by this process's torch allocator.

        By CUDA's contexts, by NCCL, and by all other processes.
        """
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)


def _close(addresses: Iterable[int]) -> None:
    for address in addresses:
        with contextlib.suppress(DriverError):  # the other process has died
            cuda_driver().close_handle(address)


@contextlib.contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Makes the device's context the thread's own, for calls of the driver.

    `torch.cuda.device` alone does not in a new thread whose device it is already: it then does nothing.
    """
    with torch.cuda.device(device):
        torch.cuda.default_stream(device).query()  # any call of the runtime does it; this one does not wait
        yield


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except (DriverError, OSError) as error:
        raise Unsupported(f"{what}: {error}") from error


_runtime = CudaRuntime()


def runtime() -> CudaRuntime:
    return _runtime


def use(other: CudaRuntime) -> None:
    """Replaces this process's runtime; for tests."""
    global _runtime
    _runtime = other


def rank_device(device: torch.device | None) -> RankGpuInfo:
    """Returns what a rank on `device` announces; `RankGpuInfo()` for None and for a device that is no GPU."""
    if device is None or not runtime().is_gpu(device):
        return RankGpuInfo()
    return _announced(runtime(), device)


def trainer_device(shards: Iterable[torch.Tensor]) -> torch.device | None:
    """Returns a trainer rank's GPU: that of its shards, else the one that its process uses; None if it uses none.

    A trainer rank whose shards are offloaded still sends from its GPU.
    """
    on_gpu = next((shard.device for shard in shards if runtime().on_gpu(shard)), None)
    if on_gpu is None and runtime().uses_gpu():
        return runtime().current_device()
    return on_gpu


@cache  # NCCL reads its settings once, too
def _announced(gpus: CudaRuntime, device: torch.device) -> RankGpuInfo:
    nccl = {"version": gpus.nccl_version()} | nccl_settings(os.environ)
    return RankGpuInfo(gpus.uuid(device), gpus.visible(), gpus.allocator(), nccl, gpus.fabric(device))
