"""GPU memory of one process: files of this host's memory, so that other processes can really map it.

An allocation is a file in the folder of the GPUs, and so is every mapping of it (another name of the same file): what
is left over is seen by listing the folder. Freed memory is filled with a pattern, for those who still read it, and its
addresses are used again by the next allocation of its size, as those of a GPU are.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch

from support.virtual_gpus.captures import Captures
from support.virtual_gpus.description import Place, VirtualGpus
from support.virtual_gpus.journal import Journal
from support.virtual_gpus.streams import Key, Streams

POISON, GARBLED = 0xDB, 0x5A
_ADDRESSES = 1 << 36
_BLOCK = 512  # torch's allocator rounds to it
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)


class OutOfMemory(RuntimeError):
    """As torch.cuda.OutOfMemoryError."""


@dataclass(frozen=True)
class Memory:
    """An allocation of this process, or of another one, mapped here.

    id       of the allocation in the process that made it; never used twice
    pid      of that process
    number   of the GPU on the host
    path     file of the allocation, or of the mapping
    mapped   whether another process made it
    """

    base: int
    nbytes: int
    id: int
    pid: int
    number: int
    path: Path
    mapped: bool = False


class VirtualMemory:
    """What this process has allocated and mapped."""

    def __init__(self, gpus: VirtualGpus, place: Place, journal: Journal) -> None:
        self._gpus, self._place, self._journal = gpus, place, journal
        self.folder = Path(gpus.folder, place.host)
        self.folder.mkdir(exist_ok=True)
        self._next = _mmap(None, _ADDRESSES, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self._reusable: dict[int, list[int]] = {}  # addresses by size
        self._by_base: dict[int, Memory] = {}
        self._bases: list[int] = []  # ascending
        self._last_id = 0
        self._lock = threading.RLock()
        self.streams, self.captures = Streams(self._lock), Captures(journal)
        self.current_stream: Callable[[int], Key] = lambda number: Key(number, 0)  # of the calling thread
        self._allocated_in: dict[int, Key] = {}  # by address: the stream in whose order the memory is used again
        self._segment: tuple[ctypes.Array[ctypes.c_ubyte], list[int]] | None = None
        self._unused: dict[int, list[Memory]] = {}  # what torch's allocator keeps, by GPU
        self._limbo: list[Memory] = []
        self._paused: dict[int, Memory] = {}  # by address
        self._writes = count()
        self.freed: dict[int, int] = {}  # allocations that torch's allocator has returned to a GPU
        self.keeps_unused = False  # as torch's allocator does until `empty_cache`
        self.contexts: set[int] = set()

    # -- allocations

    def tensor(
        self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, number: int | None = None
    ) -> torch.Tensor:
        """Returns a tensor in GPU memory of its own, or in the `segment` that is open; it contains garbage."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:  # a tensor without elements is on a device, too
            return self.tensor((1,), dtype, number)[:0].view(shape)
        number = self._place.number if number is None else number
        with self._lock:
            if self._segment is None:
                memory, offset = self._allocate(nbytes, number), 0
            else:
                memory, used = self._segment
                offset = used[0]
                used[0] += -(-nbytes // _BLOCK) * _BLOCK
                if used[0] > len(memory):
                    raise ValueError(f"the segment of {len(memory)} bytes is too small")
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)

    @contextmanager
    def segment(self, nbytes: int) -> Iterator[None]:
        """Tensors that are made in the block share one allocation, as small ones of torch's allocator do."""
        self._segment = self._allocate(nbytes, self._place.number), [0]
        try:
            yield
        finally:
            self._segment = None

    def _allocate(self, nbytes: int, number: int) -> ctypes.Array[ctypes.c_ubyte]:
        nbytes = -(-nbytes // _BLOCK) * _BLOCK
        self.use(number)
        with self._lock:
            limbo, self._limbo = self._limbo, []
            for memory in limbo:
                self._dropped(memory)
            stream = self.current_stream(number)
            unused = (m for m in self._unused.get(number, ()) if m.nbytes == nbytes)
            found = next((m for m in unused if self._allocated_in[m.base] == stream), None)
            if found is None:
                if nbytes > self.free_bytes(number):
                    self.trim(number)  # as torch's allocator does before it gives up
                if nbytes > self.free_bytes(number):
                    raise OutOfMemory(f"CUDA out of memory: {nbytes:,} bytes on virtual GPU {number}")
                found = self._map(*self._create(nbytes, number))
            else:
                self._unused[number].remove(found)
            self._allocated_in[found.base] = stream
            array = (ctypes.c_ubyte * nbytes).from_address(found.base)
            weakref.finalize(array, self._array_dropped, found.base).atexit = False
            return array

    def _create(self, nbytes: int, number: int) -> tuple[int, Memory]:
        """Returns a new file's descriptor, and what it is of, at no address yet."""
        self.captures.is_unsafe("cudaMalloc")
        self._last_id += 1
        path = self.folder / f"{number}.{os.getpid()}.{self._last_id}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.truncate(descriptor, nbytes)
        return descriptor, Memory(0, nbytes, self._last_id, os.getpid(), number, path)

    def _map(self, descriptor: int, memory: Memory) -> Memory:
        pages = _pages(memory.nbytes)
        with self._lock:
            free = self._reusable.setdefault(pages, [])
            base = free.pop() if free else self._next
            if base == self._next:
                self._next += pages + mmap.PAGESIZE
            return self._map_at(base, descriptor, memory)

    def _map_at(self, base: int, descriptor: int, memory: Memory) -> Memory:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        _mmap(base, _pages(memory.nbytes), protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
        os.close(descriptor)
        self._by_base[base] = memory = replace(memory, base=base)
        bisect.insort(self._bases, base)
        return memory

    def _unmap(self, memory: Memory) -> None:
        pages = _pages(memory.nbytes)
        with self._lock:
            _mmap(memory.base, pages, _PROT_NONE, _NOTHING, -1)
            del self._by_base[memory.base]
            self._bases.remove(memory.base)
            self._reusable[pages].append(memory.base)

    def _array_dropped(self, base: int) -> None:
        self._dropped(self._by_base[base])

    def _dropped(self, memory: Memory) -> None:
        """The last tensor on it is gone. Torch's allocator uses it again in the order of the stream that it is of.

        So work of that stream may still use it, and work of others finds a pattern.
        """
        with self._lock:
            stream = self._allocated_in[memory.base]
            if self.streams.is_doing and not self.keeps_unused:
                self._limbo.append(memory)
            elif self.keeps_unused:
                if self.streams.is_done(self.streams.point(stream)):
                    ctypes.memset(memory.base, POISON, memory.nbytes)
                else:
                    self.streams.give(stream, lambda: ctypes.memset(memory.base, POISON, memory.nbytes))
                self._unused.setdefault(memory.number, []).append(memory)
            else:
                self.streams.finish_stream(stream)
                self._free(memory)

    def _free(self, memory: Memory) -> None:
        mapped = self.mapped_by_others(memory)
        if mapped and self._gpus.freed_while_mapped == "violation":
            self._journal.broken(f"allocation {memory.id} was freed while process {mapped} had it mapped")
        if self.pinned(memory):
            self._journal.broken(f"allocation {memory.id} was freed while it was registered with NIXL")
        self._journal.note("free", id=memory.id, mapped=mapped)
        self.captures.is_unsafe("cudaFree")
        self.freed[memory.number] = self.freed.get(memory.number, 0) + 1
        ctypes.memset(memory.base, POISON, memory.nbytes)
        self._unmap(memory)
        memory.path.unlink(missing_ok=True)

    def trim(self, number: int) -> None:
        """As torch.cuda.empty_cache."""
        self._journal.note("trim", number=number)
        self.streams.finish_gpu(number)  # as cudaFree
        for memory in self._unused.pop(number, ()):
            self._free(memory)

    def reserved(self, number: int) -> int:
        """Bytes that torch's allocator has, used and not."""
        return sum(m.nbytes for m in self._by_base.values() if not m.mapped and m.number == number)

    def allocated(self, number: int) -> int:
        return self.reserved(number) - sum(m.nbytes for m in self._unused.get(number, ()))

    # -- a memory saver: other pages at the same addresses

    def pause(self, address: int) -> None:
        """Frees the pages of an allocation, and keeps its addresses, at which nothing is until `resume`."""
        with self._lock:
            memory = self.find(address)
            assert memory is not None, "allocated"
            if self.pinned(memory):
                self._journal.broken(f"the pages of allocation {memory.id} were released while registered with NIXL")
            self._journal.note("pause", id=memory.id)
            ctypes.memset(memory.base, POISON, memory.nbytes)
            _mmap(memory.base, _pages(memory.nbytes), _PROT_NONE, _NOTHING, -1)
            memory.path.unlink()
            self._bases.remove(memory.base)
            self._paused[memory.base] = self._by_base.pop(memory.base)

    def resume(self, address: int) -> None:
        """Other pages, with nothing in them."""
        with self._lock:
            memory = self._paused.pop(address)
            descriptor, made = self._create(memory.nbytes, memory.number)
            self._map_at(memory.base, descriptor, made)
            self._journal.note("resume", id=self._by_base[address].id)

    # -- registrations

    def pin(self, address: int, nbytes: int, number: int) -> tuple[str, int]:
        """Returns another name of the file of an allocation, which keeps its pages, and the byte at `address`."""
        found = self.find(address)
        if found is None or address + nbytes > found.base + found.nbytes or found.mapped:
            raise self._journal.broken("NIXL was given memory that is not allocated")
        link = self.folder / f"{found.path.name}.registered.{os.getpid()}.{number}"
        os.link(found.path, link)
        return str(link), address - found.base

    def unpin(self, path: str) -> None:
        if path:
            Path(path).unlink(missing_ok=True)

    def pinned(self, memory: Memory) -> bool:
        """Returns whether this process has registered any of it."""
        return any(self.folder.glob(f"{memory.path.name}.registered.{os.getpid()}.*"))

    # -- memory of other processes

    def open(self, pid: int, id: int, number: int, nbytes: int) -> Memory | None:
        """Maps it; None if it is not there any more."""
        with self._lock:
            known = next((m for m in self.mappings() if (m.pid, m.id) == (pid, id)), None)
            if known is not None:
                return known
            path = self.folder / f"{number}.{pid}.{id}"
            link = self.folder / f"{path.name}.open.{os.getpid()}"
            try:
                os.link(path, link)
            except FileNotFoundError:
                return None
            found = Memory(0, nbytes, id, pid, number, link, mapped=True)
            if self._gpus.is_garbled(self._place.number, number):
                link.unlink()
                link.write_bytes(bytes([GARBLED]) * nbytes)  # what a reader sees, whoever writes
            return self._map(os.open(link, os.O_RDWR), found)

    def close(self, memory: Memory) -> None:
        self._unmap(memory)
        memory.path.unlink()

    def mappings(self) -> list[Memory]:
        """Allocations of other processes that are mapped here."""
        return [m for m in self._by_base.values() if m.mapped]

    def mapped_by_others(self, memory: Memory) -> list[int]:
        """Processes that have it mapped."""
        return sorted(int(f.name.rpartition(".")[2]) for f in self.folder.glob(f"{memory.path.name}.open.*"))

    def unsynchronized(self) -> list[int]:
        """Processes that have started to write to memory which is mapped here, and have not waited for the end."""
        started = {tuple(map(int, f.name.split(".")[1:4])) for f in self.folder.glob("writing.*")}
        return sorted({m.pid for m in self.mappings() if (m.number, m.pid, m.id) in started})

    def all_mapped_by_others(self) -> list[int]:
        """Processes that have any of this process's memory mapped."""
        own = f"*.{os.getpid()}.*.open.*"
        return sorted({int(f.name.rpartition(".")[2]) for f in self.folder.glob(own)})

    # -- all of them

    def write_later(self, number: int, addresses: Iterable[int], work: Callable[[], object]) -> None:
        """Gives the thread's current stream of a GPU work that writes there. Others see that it has been started."""
        written = {(m.number, m.pid, m.id) for m in map(self.find, addresses) if m is not None}
        files = [self.folder / ".".join(map(str, ("writing", *of, next(self._writes)))) for of in written]
        for file in files:
            file.touch()

        def write() -> None:
            work()
            for file in files:
                file.unlink()

        self.streams.give(self.current_stream(number), write)

    def find(self, address: int) -> Memory | None:
        with self._lock:
            at = bisect.bisect_right(self._bases, address) - 1
            found = self._by_base[self._bases[at]] if at >= 0 else None
        return found if found is not None and address < found.base + found.nbytes else None

    def gpu_of(self, memory: Memory) -> int:
        """Returns the number of the GPU that works on it here: this process's own, for which others' is mapped."""
        return self._place.number if memory.mapped else memory.number

    def use(self, number: int) -> None:
        """Makes this process's context on a GPU, if it has none there."""
        if number not in self.contexts:
            self.contexts.add(number)
            self._journal.note("context", number=number)
            (self.folder / f"{number}.{os.getpid()}.context").touch()
            if number != self._place.number:
                self._journal.broken(
                    f"a context was made on GPU {number}, and the process's own is {self._place.number}"
                )

    def free_bytes(self, number: int) -> int:
        """Of the GPU, as cudaMemGetInfo counts. What is freed but mapped elsewhere is not free."""
        contexts, used = 0, {}
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):  # somebody has unmapped it just now
                if not entry.name.startswith(f"{number}."):
                    continue
                status = entry.stat()
                contexts += entry.name.endswith(".context")
                used[status.st_ino] = status.st_size
        return self._gpus.capacity - contexts * self._gpus.context - sum(used.values())


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int) -> int:
    mapped = _libc.mmap(address, nbytes, protection, flags, descriptor, 0)
    if mapped == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(mapped)
