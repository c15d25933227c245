"""NIXL's agents over virtual GPU memory: what is registered are pages, and a read ends later than it is started.

A network card, and UCX's other ways to a GPU, look a page up when memory is registered, and never again. So a read
goes to the files that were at the addresses then, on both sides, whatever is there now. Host memory is read where it
is: its pages do not change here.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from support.virtual_gpus.journal import Journal
from support.virtual_gpus.memory import VirtualMemory

_POLLS = 2  # until a read has ended
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
_libc = ctypes.CDLL(None, use_errno=True)


class nixlNotFoundError(Exception):
    """Memory that is read has not been registered."""


class Region(msgspec.Struct, frozen=True):
    """Registered memory. `path` is another name of the file at a GPU's addresses, `offset` the first byte in it."""

    kind: str
    address: int
    nbytes: int
    path: str = ""
    offset: int = 0

    def at(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes


class _Metadata(msgspec.Struct, frozen=True):
    name: str
    pid: int
    regions: list[Region]


class VirtualNixl:
    """In place of the module `nixl._api`."""

    def __init__(self, memory: VirtualMemory, journal: Journal) -> None:
        self._memory, self._journal, self._numbers = memory, journal, count(1)

    def install(self) -> None:
        from sglang_reshard.routes.nixl import agent

        _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)  # other processes read host memory of this one
        module: Any = ModuleType("nixl._api")
        module.nixl_agent = lambda name, _config: VirtualAgent(name, self._memory, self._journal, self._numbers)
        module.nixl_agent_config = lambda **options: SimpleNamespace(**options)
        agent._nixl = lambda: module  # type: ignore[assignment]


class VirtualAgent:
    """As nixl._api.nixl_agent."""

    backends = ("UCX",)

    def __init__(self, name: str, memory: VirtualMemory, journal: Journal, numbers: Any) -> None:
        self._name, self._memory, self._journal, self._numbers = name, memory, journal, numbers
        self._regions: dict[int, Region] = {}
        self._peers: dict[str, _Metadata] = {}

    def register_memory(self, ranges: list[tuple[int, int, int, str]], kind: str) -> list[int]:
        numbers = []
        for address, nbytes, _gpu, _ in ranges:
            number = next(self._numbers)
            path, offset = self._memory.pin(address, nbytes, number) if kind == "VRAM" else ("", 0)
            self._regions[number] = Region(kind, address, nbytes, path, offset)
            numbers.append(number)
        self._journal.note("register_nixl", kind=kind, nbytes=sum(r[1] for r in ranges))
        return numbers

    def deregister_memory(self, numbers: list[int]) -> None:
        for number in numbers:
            self._memory.unpin(self._regions.pop(number).path)

    def __del__(self) -> None:
        self.deregister_memory(list(self._regions))

    def get_agent_metadata(self) -> bytes:
        return msgspec.msgpack.encode(_Metadata(self._name, os.getpid(), list(self._regions.values())))

    def add_remote_agent(self, data: bytes) -> str:
        found = msgspec.msgpack.decode(data, type=_Metadata)
        self._peers[found.name] = found
        return found.name

    def get_xfer_descs(self, rows: np.ndarray, kind: str) -> tuple[str, list[list[int]]]:
        return kind, rows.tolist()

    def initialize_xfer(self, _operation: str, to: Any, of: Any, peer: str, _message: bytes) -> _Read:
        known = self._peers[peer]
        sources = [_region(known.regions, of[0], address, nbytes) for address, nbytes, _ in of[1]]
        targets = [_region(list(self._regions.values()), to[0], address, nbytes) for address, nbytes, _ in to[1]]
        moves = [
            _Move(source, s[0] - source.address, target, t[0] - target.address, s[1])
            for source, s, target, t in zip(sources, of[1], targets, to[1], strict=True)
        ]
        return _Read(known.pid, moves)

    def transfer(self, read: _Read) -> str:
        read.polls = 0
        return "PROC"

    def check_xfer_state(self, read: _Read) -> str:
        read.polls += 1
        if read.polls == _POLLS:
            try:
                for move in read.moves:
                    move.run(read.pid)
            except OSError:
                return "ERR"
        return "DONE" if read.polls >= _POLLS else "PROC"


@dataclass(frozen=True)
class _Move:
    """`nbytes` from `source_at` bytes of the source to `target_at` of the target."""

    source: Region
    source_at: int
    target: Region
    target_at: int
    nbytes: int

    def run(self, pid: int) -> None:
        if self.source.path:
            data = _of_file(self.source.path, self.source.offset + self.source_at, self.nbytes)
        else:
            data = _of_process(pid, self.source.address + self.source_at, self.nbytes)
        if self.target.path:
            descriptor = os.open(self.target.path, os.O_RDWR)
            os.pwrite(descriptor, data, self.target.offset + self.target_at)
            os.close(descriptor)
        else:
            ctypes.memmove(self.target.address + self.target_at, data, self.nbytes)


@dataclass
class _Read:
    pid: int
    moves: list[_Move]
    polls: int = 0

    def release(self) -> None:
        self.moves = []


def _region(regions: list[Region], kind: str, address: int, nbytes: int) -> Region:
    for region in regions:
        if region.kind == kind and region.at(address, nbytes):
            return region
    raise nixlNotFoundError(f"{nbytes} bytes of {kind} at {address:#x} are not registered")


def _of_file(path: str, offset: int, nbytes: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)  # fails once it has been deregistered
    try:
        return os.pread(descriptor, nbytes, offset)
    finally:
        os.close(descriptor)


def _of_process(pid: int, address: int, nbytes: int) -> bytes:
    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))

    data = ctypes.create_string_buffer(nbytes)
    local, remote = Vector(ctypes.addressof(data), nbytes), Vector(address, nbytes)
    if _libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) != nbytes:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return data.raw
