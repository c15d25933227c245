"""Describes hosts, their GPUs, and what each process has of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(frozen=True)
class VirtualGpus:
    """GPUs of several hosts that are alike.

    folder           of the memory and the journal that all processes share, see `new_folder`
    hosts            names
    gpus             of each host
    without_peers    numbers of GPUs of a host that have no peer access to each other, in pairs
    garbled          pairs likewise that are said to have it, and read other bytes than are there
    capacity         bytes of a GPU
    context          bytes that one process takes of a GPU by using it
    freed_while_mapped  "violation", or "undefined": the readers then see a pattern, as nothing is promised to them
    """

    folder: str
    hosts: tuple[str, ...] = ("host 0",)
    gpus: int = 8
    without_peers: frozenset[tuple[int, int]] = frozenset()
    garbled: frozenset[tuple[int, int]] = frozenset()
    capacity: int = 256 * MIB
    context: int = 4 * MIB
    freed_while_mapped: str = "violation"

    def uuid(self, host: str, number: int) -> str:
        return f"GPU-{self.hosts.index(host):04x}-{number:04x}"

    def have_peer_access(self, number: int, other: int) -> bool:
        return not {(number, other), (other, number)} & self.without_peers

    def is_garbled(self, number: int, other: int) -> bool:
        return bool({(number, other), (other, number)} & self.garbled)


@dataclass(frozen=True)
class Place:
    """Where one process runs.

    visible      CUDA_VISIBLE_DEVICES: numbers of the host's GPUs, by the process's own indices
    own          index of the GPU that the process uses
    allocator    of torch: "native", "expandable_segments" or "cudaMallocAsync"; only native memory has handles
    environment  set before anything else
    """

    host: str
    visible: tuple[int, ...]
    own: int = 0
    allocator: str = "native"
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Of its GPU on the host."""
        return self.visible[self.own]
