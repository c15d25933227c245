"""A runtime whose GPU memory is host memory of this process, for tests of one module. Counts what is asked of it.

Of processes, contexts and threads it knows nothing: `support.virtual_gpus` does.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu import runtime as gpu_runtime
from sglang_reshard.gpu.runtime import Allocation, CudaRuntime
from sglang_reshard.layout.regions import LocalRegion
from sglang_reshard.memory.peer_memory import PeerMemory

R = TypeVar("R", bound=CudaRuntime)
GPU = torch.device("cuda", 3)  # an engine rank's own


class OneProcessRuntime(CudaRuntime):
    """`allocate` makes GPU memory; every tensor on it is on the one GPU, though torch says that it is on the CPU."""

    def __init__(self, uses_gpu: bool = True) -> None:
        super().__init__()
        self.calls: list[tuple[object, ...]] = []  # in order
        self.opened: Counter[int] = Counter()  # by address
        self.registered: dict[int, int] = {}  # bytes by address
        self.can_register = True
        self.without_handles = ""  # why memory has none
        self.pinned: set[int] = set()  # addresses
        self.freed: int | None = 0  # allocations, as torch's allocator counts
        self.pages: list[torch.Tensor] = []  # marks
        self._uses_gpu = uses_gpu
        self._allocations: dict[int, tuple[Allocation, ctypes.Array[ctypes.c_char]]] = {}
        self._last_id = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns an allocation of the driver as bytes, of which tensors are views."""
        memory = ctypes.create_string_buffer(nbytes)
        base = ctypes.addressof(memory)
        self._last_id += 1
        self._allocations[base] = Allocation(base, nbytes, self._last_id), memory
        return torch.frombuffer(memory, dtype=torch.uint8)

    def reallocate(self, memory: torch.Tensor) -> None:
        """As if the allocation had been freed, and a new one had got its address."""
        allocation, buffer = self._allocations[memory.data_ptr()]
        self._last_id += 1
        self.freed = None if self.freed is None else self.freed + 1
        self._allocations[allocation.base] = allocation._replace(id=self._last_id), buffer

    def free(self, memory: torch.Tensor) -> None:
        self.freed = None if self.freed is None else self.freed + 1
        del self._allocations[memory.data_ptr()]

    def count(self, call: str) -> int:
        return sum(c[0] == call for c in self.calls)

    def _find(self, address: int) -> Allocation | None:
        found = (a for a, _ in self._allocations.values() if a.base <= address < a.base + a.nbytes)
        return next(found, None)

    # -- CudaRuntime's

    def on_gpu(self, memory: torch.Tensor | torch.UntypedStorage) -> bool:
        return self._find(memory.data_ptr()) is not None

    def uses_gpu(self) -> bool:
        return self._uses_gpu

    def used_devices(self) -> list[torch.device]:
        return [GPU] if self._uses_gpu else []

    def current_device(self) -> torch.device:
        return GPU

    def visible(self) -> tuple[str, ...]:
        return (self.uuid(GPU),)

    def allocator(self) -> str:
        return "native"

    def nccl_version(self) -> str:
        return "2.99"

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self.pinned

    def uuid(self, device: torch.device) -> str:
        return "GPU-of-the-trainer"

    def allocation(self, address: int, device: torch.device) -> Allocation:
        self.calls.append(("allocation", address))
        found = self._find(address)
        if self.without_handles or found is None:
            raise Unsupported(self.without_handles or "its GPU memory cannot be shared: CUDA_ERROR_INVALID_VALUE")
        return found

    def export_handle(self, allocation: Allocation, device: torch.device) -> bytes:
        self.calls.append(("export", allocation.id))
        return allocation.base.to_bytes(8, "little") + allocation.id.to_bytes(56, "little")

    def frees(self, device: torch.device) -> int | None:
        return self.freed

    def filled(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.pages.append(self.allocate(values.nbytes))
        return self.pages[-1].view(values.dtype).copy_(values)

    def open_handles(self, handles: Sequence[bytes], device: torch.device) -> list[int]:
        opened: list[int] = []
        for handle in handles:
            base, id = int.from_bytes(handle[:8], "little"), int.from_bytes(handle[8:], "little")
            found = self._find(base)
            if self.without_handles or found is None or found.id != id:
                self.close_handles(opened, device)
                raise Unsupported("GPU memory cannot be mapped: cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE")
            self.calls.append(("open", id, device))
            self.opened[base] += 1
            opened.append(base)
        return opened

    def close_handles(self, addresses: Sequence[int], device: torch.device) -> None:
        for address in addresses:
            self.calls.append(("close", address, device))
            self.opened[address] -= 1
            assert self.opened[address] >= 0

    def storage(self, address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        return super().storage(address, nbytes, torch.device("cpu"))

    def register_host(self, address: int, nbytes: int, device: torch.device) -> bool:
        if self.can_register:
            self.registered[address] = nbytes
        return self.can_register

    def unregister_host(self, address: int, device: torch.device) -> None:
        del self.registered[address]

    def using(self, device: torch.device) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self, devices: Iterable[torch.device]) -> None:
        self.calls.append(("synchronize", *sorted(map(str, set(devices)))))


@contextmanager
def replaced_runtime(ours: R) -> Iterator[R]:
    """Installs a runtime; puts back what was there."""
    before = gpu_runtime.runtime()
    gpu_runtime.use(ours)
    try:
        yield ours
    finally:
        gpu_runtime.use(before)


@contextmanager
def one_process_runtime(uses_gpu: bool = True) -> Iterator[OneProcessRuntime]:
    """Installs one; at the end nothing may be mapped or registered any more."""
    ours = OneProcessRuntime(uses_gpu)
    try:
        with replaced_runtime(ours):
            yield ours
    finally:
        assert not +ours.opened, "memory is still mapped"
        assert not ours.registered, "memory is still registered"


def shard_in(memory: PeerMemory, number: int, like: torch.Tensor) -> torch.Tensor:
    """Returns shard `number` of mapped memory, of the shape and dtype of `like`."""
    return memory.region(number, LocalRegion.whole(tuple(like.shape)), like.dtype)
