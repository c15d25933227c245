"""What the rest of the package asks about GPUs: whether memory is on one, its handles, devices and streams.

`runtime()` returns the process's CudaRuntime. Tests of the rules of GPUs replace it by one of virtual GPUs (`use`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.driver import DriverError, cuda_driver


class Allocation(NamedTuple):
    """GPU memory that one handle refers to: first address, bytes, and an id that no other allocation gets.

    The id tells memory that was freed and allocated again at the same address.
    """

    base: int
    nbytes: int
    id: int


class CudaRuntime:
    """GPUs as CUDA has them. Every method names the device that it means: none depends on the thread's current one."""

    def is_gpu(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def on_gpu(self, memory: torch.Tensor | torch.UntypedStorage) -> bool:
        return memory.device.type == "cuda"

    def uses_gpu(self) -> bool:
        """Returns whether this process has used a GPU."""
        return torch.cuda.is_initialized()

    def uuid(self, device: torch.device) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)

    # -- memory of this process, for others

    def allocation(self, address: int, device: torch.device) -> Allocation:
        """Returns the allocation that `address` lies in. Raises Unsupported for memory that has no handles."""
        with torch.cuda.device(device), _translated("memory cannot be shared"):
            driver = cuda_driver()
            if not driver.has_handle(address):
                raise Unsupported(
                    "its GPU memory has no CUDA IPC handle, as is so for expandable segments, cudaMallocAsync and "
                    "pools of virtual memory; unset PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or use "
                    "transport='p2p'"
                )
            return Allocation(*driver.allocation(address))

    def export_handle(self, allocation: Allocation, device: torch.device) -> bytes:
        with torch.cuda.device(device), _translated("memory cannot be shared"):
            return cuda_driver().export_handle(allocation.base)

    # -- memory of other processes

    def open_handle(self, handle: bytes, device: torch.device) -> int:
        """Maps an allocation of another process for `device`, which need not see the GPU that it is on.

        Returns its address here. Raises Unsupported if `device` cannot reach that GPU.
        """
        torch.cuda.synchronize(device)  # makes the device's context, if this thread is the first to use it
        with torch.cuda.device(device), _translated("GPU memory cannot be mapped"):
            return cuda_driver().open_handle(handle)

    def close_handle(self, address: int, device: torch.device) -> None:
        """Unmaps it. No kernel may be reading from it any more."""
        with torch.cuda.device(device), contextlib.suppress(DriverError):  # the other process has died
            cuda_driver().close_handle(address)

    def storage(self, address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Returns mapped memory as a storage on `device`. It does not own the memory."""
        found: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)  # its stub is wrong
        return found

    def register_host(self, address: int, nbytes: int, device: torch.device) -> bool:
        """Makes read-only host memory readable by kernels, at the same address. Returns False if the host cannot."""
        try:
            with torch.cuda.device(device):
                cuda_driver().register_host(address, nbytes)
        except DriverError:
            return False
        return True

    def unregister_host(self, address: int, device: torch.device) -> None:
        with torch.cuda.device(device), contextlib.suppress(DriverError):
            cuda_driver().unregister_host(address)

    # -- devices and streams

    def synchronize(self, devices: Iterable[torch.device]) -> None:
        """Waits until all that was started on these devices has ended; devices that are no GPU are skipped."""
        for device in set(devices):
            if self.is_gpu(device):
                torch.cuda.synchronize(device)

    @contextlib.contextmanager
    def own_stream(self, device: torch.device) -> Iterator[None]:
        """Runs the block in a stream of its own, after what the current one has been given; waits for it at the end."""
        if not self.is_gpu(device):
            yield
            return
        with torch.cuda.device(device):  # a new thread starts at GPU 0
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.default_stream(device))
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                stream.synchronize()  # memory that the block frees must not be reused under its last kernels

    def free_bytes(self, device: torch.device) -> int:
        """Returns what can be allocated, with what torch's allocator keeps unused."""
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def trim(self, device: torch.device) -> None:
        """Returns memory that torch's allocator keeps unused to the GPU."""
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


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
