"""Makes torch say of virtual GPU memory that it is on a GPU, and answer the calls of `torch.cuda` that updates make.

Only in processes that tests start for this: what is replaced stays replaced.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from support.virtual_gpus.description import Place, VirtualGpus
from support.virtual_gpus.journal import Journal
from support.virtual_gpus.memory import VirtualMemory
from support.virtual_gpus.streams import Key, Point

_DEVICE = torch._C.TensorBase.device  # type: ignore[attr-defined]
_STORAGE_DEVICE = torch._C.StorageBase.device  # type: ignore[attr-defined]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class VirtualTorchCuda:
    """torch.cuda of one process. Devices are indices into what it sees, and each thread begins at index 0."""

    def __init__(self, gpus: VirtualGpus, place: Place, memory: VirtualMemory, journal: Journal) -> None:
        self._gpus, self._place, self._memory, self._journal = gpus, place, memory, journal
        self._thread = threading.local()
        self._copying: set[int] = set()  # numbers of GPUs

    def install(self) -> None:
        for name in (
            "is_initialized", "device_count", "current_device", "set_device", "synchronize", "get_device_properties",
            "mem_get_info", "memory_allocated", "memory_reserved", "max_memory_allocated", "reset_peak_memory_stats",
            "empty_cache", "Event", "default_stream", "current_stream", "set_stream", "stream", "get_allocator_backend",
            "can_device_access_peer",
        ):  # fmt: skip
            setattr(torch.cuda, name, getattr(self, name))
        self._memory.current_stream = self.stream_of
        torch._C._cuda_hasPrimaryContext = lambda i: self._number(i) in self._memory.contexts  # type: ignore[attr-defined]
        torch.cuda.memory._snapshot = self._snapshot  # type: ignore[assignment]
        torch.cuda.memory.memory_stats_as_nested_dict = self._memory_stats
        torch.cuda.nccl.version = lambda: (2, 28, 0)  # type: ignore[assignment]
        torch.cuda.device = self._device_context()  # type: ignore[misc,assignment]
        torch.cuda.Stream = self.new_stream  # type: ignore[misc,assignment]
        torch.Tensor.device = property(self._device_of)  # type: ignore[assignment,misc]
        torch.Tensor.is_cuda = property(lambda t: self._device_of(t).type == "cuda")  # type: ignore[assignment,misc]
        torch.UntypedStorage.device = property(self._device_of_storage)  # type: ignore[assignment,misc]
        torch.UntypedStorage.is_cuda = property(  # type: ignore[assignment,misc]
            lambda s: self._device_of_storage(s).type == "cuda"
        )
        for factory in ("empty", "zeros", "ones", "full", "tensor", "arange"):
            setattr(torch, factory, self._made_on(getattr(torch, factory)))
        for factory in ("empty_like", "zeros_like", "full_like"):
            setattr(torch, factory, self._made_like(getattr(torch, factory)))
        torch.Tensor.to = self._moved(torch.Tensor.to)  # type: ignore[method-assign,assignment]
        torch.Tensor.cpu = lambda t: t.to("cpu")  # type: ignore[method-assign,assignment,misc]
        torch.Tensor.clone = self._made_like(torch.Tensor.clone)  # type: ignore[method-assign,assignment]

    # -- where memory is

    def _device_of(self, tensor: torch.Tensor) -> torch.device:
        device: torch.device = _DEVICE.__get__(tensor)
        if type(tensor) not in _PLAIN or device.type != "cpu":
            return device
        return self._gpu_at(tensor.data_ptr() or tensor.untyped_storage().data_ptr(), device)

    def _device_of_storage(self, storage: torch.UntypedStorage) -> torch.device:
        device: torch.device = _STORAGE_DEVICE.__get__(storage)
        return self._gpu_at(storage.data_ptr(), device) if device.type == "cpu" else device

    def _gpu_at(self, address: int, otherwise: torch.device) -> torch.device:
        found = self._memory.find(address)
        if found is None:
            return otherwise
        if found.mapped:
            return torch.device("cuda", self._place.own)  # for which it was opened
        return torch.device("cuda", self._place.visible.index(found.number))

    # -- making tensors

    def _on(self, device: torch.device, made: torch.Tensor) -> torch.Tensor:
        """Returns the tensor in memory of the GPU."""
        index = self._index(device)
        there = self._memory.tensor(made.shape, made.dtype, self._number(index))
        return there.copy_(made)

    def _made_on(self, factory: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            if device is None or (found := torch.device(device)).type != "cuda":
                return factory(*args, device=device, **kwargs)
            return self._on(found, factory(*args, **kwargs))

        return make

    def _made_like(self, factory: Callable[..., Any]) -> Callable[..., Any]:
        def make(tensor: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
            wanted = tensor.device if device is None else torch.device(device)
            if wanted.type != "cuda":
                return (
                    factory(tensor, *args, **kwargs)
                    if device is None
                    else factory(tensor, *args, device=device, **kwargs)
                )
            made = factory(tensor, *args, **kwargs)
            return self._on(wanted, made) if type(made) in _PLAIN else made

        return make

    def _moved(self, to: Callable[..., Any]) -> Callable[..., Any]:
        def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device", args[0] if args and isinstance(args[0], torch.device | str) else None)
            if device is None or torch.device(device).type not in ("cuda", "cpu"):
                return to(tensor, *args, **kwargs)
            args = tuple(a for a in args if a is not device)
            kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking")}
            cast = to(tensor, *args, **kwargs) if args or kwargs else tensor
            if torch.device(device).type == "cpu":
                return _CLONE(cast) if tensor.device.type == "cuda" else cast
            return cast if tensor.device == torch.device(device) else self._on(torch.device(device), cast)

        return moved

    # -- torch.cuda

    def _index(self, device: Any = None) -> int:
        if device is None:
            return self.current_device()
        index = device if isinstance(device, int) else torch.device(device).index
        index = self.current_device() if index is None else index
        if index >= len(self._place.visible):
            raise RuntimeError(f"CUDA error: invalid device ordinal ({index}: this process sees {self._place.visible})")
        return index

    def _number(self, device: Any = None) -> int:
        return self._place.visible[self._index(device)]

    def current_context(self) -> int | None:
        """Number of the GPU whose context this thread has; None if it has none, as a new thread."""
        index = getattr(self._thread, "context", None)
        return None if index is None else self._place.visible[index]

    def is_initialized(self) -> bool:
        return bool(self._memory.contexts)

    def device_count(self) -> int:
        return len(self._place.visible)

    def current_device(self) -> int:
        return getattr(self._thread, "index", 0)

    def set_device(self, device: Any) -> None:
        """As cudaSetDevice, which makes a context; nothing happens where the device is the thread's already."""
        index = self._index(device)
        if index != self.current_device():
            self._memory.use(self._place.visible[index])
            self._thread.index = self._thread.context = index

    def _enter(self, index: int) -> int:
        """As c10::cuda::ExchangeDevice."""
        before = self.current_device()
        self.set_device(index)
        return before

    def _leave(self, before: int) -> None:
        """As c10::cuda::MaybeSetDevice, which makes no context."""
        if before != self.current_device():
            self._thread.index = before
            if self._place.visible[before] in self._memory.contexts:
                self._thread.context = before

    def _device_context(self) -> type:
        cuda = self

        class device:
            def __init__(self, device: Any) -> None:
                self.index = cuda._index(device)

            def __enter__(self) -> None:
                self.before = cuda._enter(self.index)

            def __exit__(self, *_: object) -> None:
                cuda._leave(self.before)

        return device

    def synchronize(self, device: Any = None) -> None:
        index = self._index(device)
        self._memory.captures.conflicts("cudaDeviceSynchronize")
        self.bind_context(index)
        number = self._place.visible[index]
        self._memory.streams.finish_gpu(number)
        self.ended(number)
        self._journal.note("synchronize", number=number)

    def bind_context(self, index: int) -> None:
        """As any call of CUDA's runtime for a device, which makes its context the thread's while it is the current."""
        before = self._enter(index)
        self._memory.use(self._place.visible[index])
        self._thread.context = index
        self._leave(before)

    # -- what was started on a GPU, and ends when it is synchronized

    def copied(self, number: int) -> None:
        """Copies of an update."""
        self._copying.add(number)

    def is_copying(self) -> bool:
        return bool(self._copying)

    def ended(self, number: int) -> None:
        """Something was waited for: perhaps all that a GPU was given has ended."""
        if not self._memory.streams.is_busy(number):
            self._copying.discard(number)

    def get_device_properties(self, device: Any = None) -> Any:
        number = self._number(device)
        return SimpleNamespace(
            uuid=self._gpus.uuid(self._place.host, number), name="virtual GPU", total_memory=self._gpus.capacity,
            multi_processor_count=132, major=9, minor=0,
        )  # fmt: skip

    def can_device_access_peer(self, device: Any, peer: Any) -> bool:
        return self._gpus.have_peer_access(self._number(device), self._number(peer))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self._memory.free_bytes(self._number(device)), self._gpus.capacity

    def memory_allocated(self, device: Any = None) -> int:
        return self._memory.allocated(self._number(device))

    def memory_reserved(self, device: Any = None) -> int:
        return self._memory.reserved(self._number(device))

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.memory_allocated(device)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._number(device)

    def empty_cache(self) -> None:
        self._memory.trim(self._number())

    def get_allocator_backend(self) -> str:
        return "cudaMallocAsync" if self._place.allocator == "cudaMallocAsync" else "native"

    def _snapshot(self, *_: Any) -> dict[str, Any]:
        return {"allocator_settings": {"expandable_segments": self._place.allocator == "expandable_segments"}}

    def _memory_stats(self, device: Any = None) -> dict[str, Any]:
        return {"num_device_free": self._memory.freed.get(self._number(device), 0)}

    # -- streams

    def key(self, stream: VirtualStream) -> Key:
        return Key(self._place.visible[stream.device_index], stream.stream_id)

    def stream_of(self, number: int) -> Key:
        """Returns the thread's current stream of a GPU."""
        return self.key(self.current_stream(self._place.visible.index(number)))

    def default_stream(self, device: Any = None) -> VirtualStream:
        return VirtualStream(self, self._index(device), 0)

    def current_stream(self, device: Any = None) -> VirtualStream:
        index = self._index(device)
        return getattr(self._thread, "streams", {}).get(index) or self.default_stream(index)

    def set_stream(self, stream: VirtualStream) -> None:
        self._thread.streams = {**getattr(self._thread, "streams", {}), stream.device_index: stream}

    @contextmanager
    def stream(self, stream: VirtualStream) -> Iterator[None]:
        before = self.current_stream(stream.device_index)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def new_stream(self, device: Any = None, **_: Any) -> VirtualStream:
        return VirtualStream(self, self._index(device), next(_stream_ids))

    def Event(self, *_: Any, **__: Any) -> VirtualEvent:
        return VirtualEvent(self)

    def until(self, point: Point, call: str) -> None:
        """Waits for what a stream was given, by a call of CUDA."""
        self._memory.captures.is_unsafe(call)
        self._memory.streams.finish(point)
        self.ended(point.key.gpu)


@dataclass(frozen=True)
class VirtualStream:
    """As torch.cuda.Stream."""

    cuda: VirtualTorchCuda
    device_index: int
    stream_id: int

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    @property
    def point(self) -> Point:
        return self.cuda._memory.streams.point(self.cuda.key(self))

    def synchronize(self) -> None:
        self.cuda.until(self.point, "cudaStreamSynchronize")

    def query(self) -> bool:
        self.cuda._memory.captures.is_unsafe("cudaStreamQuery")
        self.cuda.bind_context(self.device_index)
        return self.cuda._memory.streams.is_done(self.point)

    def wait_stream(self, other: VirtualStream) -> None:
        self.cuda._memory.streams.wait(self.cuda.key(self), other.point)

    def wait_event(self, event: VirtualEvent) -> None:
        if event.point is not None:
            self.cuda._memory.streams.wait(self.cuda.key(self), event.point)


class VirtualEvent:
    """As torch.cuda.Event."""

    def __init__(self, cuda: VirtualTorchCuda) -> None:
        self._cuda = cuda
        self.point: Point | None = None
        self._asked = 0

    def record(self, stream: VirtualStream | None = None) -> None:
        self.point, self._asked = (stream or self._cuda.current_stream()).point, 0

    def wait(self, stream: VirtualStream | None = None) -> None:
        (stream or self._cuda.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        if self.point is not None:
            self._cuda.until(self.point, "cudaEventSynchronize")

    def query(self) -> bool:
        """Somebody who asks again and again sees it end."""
        self._cuda._memory.captures.is_unsafe("cudaEventQuery")
        if self.point is None:
            return True
        self._asked += 1
        if self._asked > _QUERIES:
            self._cuda._memory.streams.finish(self.point)
        return self._cuda._memory.streams.is_done(self.point)


_QUERIES = 2
_stream_ids = itertools.count(1)
_CLONE = torch.Tensor.clone
