"""The request: parsed from command line options, and sent to the worker process."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from sglang_reshard.errors import Mismatch
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.protocol.validation import check_transport

_MAX_RANKS = 1 << 16  # of either side


class Source(msgspec.Struct, frozen=True):
    """The trainer's device mesh, outermost dimension first: replicas, FSDP2 shards, tensor parallel shards."""

    copies: int = 1
    shards: int = 1
    tensor_parallel: int = 1

    @property
    def trainer_ranks(self) -> int:
        return math.prod((self.copies, self.shards, self.tensor_parallel))

    def __str__(self) -> str:
        fsdp = f"hsdp={self.copies}x{self.shards}" if self.copies > 1 else f"fsdp={self.shards}"
        parts = [fsdp] if self.copies * self.shards > 1 else []
        return ",".join(parts + ([f"tp={self.tensor_parallel}"] if self.tensor_parallel > 1 or not parts else []))

    @classmethod
    def parse(cls, text: str) -> Source:
        """Parses "tp=4", "fsdp=64", "fsdp=8,tp=8" or "hsdp=2x32". Raises Mismatch."""
        known = "tp=4, fsdp=64, fsdp=8,tp=8 or hsdp=2x32"
        sizes = _sizes(text, "--source", known, {"tp", "fsdp", "hsdp"})
        if "fsdp" in sizes and "hsdp" in sizes:
            raise Mismatch(f"--source {text}: fsdp and hsdp exclude each other; hsdp=2x32 is fsdp=32 with 2 replicas")
        copies, _, shards = sizes.get("hsdp", "1x1").partition("x")
        if not shards:
            raise Mismatch(f"--source {text}: hsdp takes replicas x shards, for example hsdp=2x32")
        found = cls(
            _count(copies, "--source", text),
            _count(sizes.get("fsdp", shards), "--source", text),
            _count(sizes.get("tp", "1"), "--source", text),
        )
        _check_ranks(found.trainer_ranks, "--source", text)
        return found


class EngineSizes(msgspec.Struct, frozen=True):
    """The engine's parallel sizes, named as SGLang's arguments; `dp` is the size of dp-attention."""

    tp: int
    ep: int = 1
    dp: int = 1
    pp: int = 1

    @property
    def engine_ranks(self) -> int:
        """Those of dp-attention are tensor parallel ranks."""
        return self.pp * self.tp

    def __str__(self) -> str:
        others = (("ep", self.ep), ("dp", self.dp), ("pp", self.pp))
        return ",".join([f"tp={self.tp}"] + [f"{name}={size}" for name, size in others if size > 1])

    @classmethod
    def parse(cls, text: str) -> EngineSizes:
        """Parses "tp=16", "tp=16,ep=16", "tp=16,ep=16,dp=16" or "tp=8,pp=2". Raises Mismatch."""
        sizes = _sizes(text, "--target", "tp=16, or tp=16,ep=16,dp=16, or tp=8,pp=2", {"tp", "ep", "dp", "pp"})
        found = cls(**{"tp": 1} | {name: _count(size, "--target", text) for name, size in sizes.items()})
        for name, meaning in (("ep", "expert parallel groups"), ("dp", "groups of dp-attention")):
            if found.tp % (size := getattr(found, name)):
                raise Mismatch(f"--target {text}: tp={found.tp} is not divisible by {name}={size}, the {meaning}")
        _check_ranks(found.engine_ranks, "--target", text)
        return found


class PlanRequest(msgspec.Struct, frozen=True):
    """The inputs of a plan.

    model            name shown in the result
    folder           folder with config.json, and with safetensors if there are any
    layers           number of layers to plan for; 0 for all
    device           the engine's device, "cuda" or "cpu"
    ranks_per_host   ranks of either side on one host
    colocated        whether engine ranks are on the trainer ranks' GPUs, from the first on
    links            bytes per second within a host and between hosts; 0 for the cost model's defaults
    ignore           fnmatch patterns of names of tensors that the trainer leaves out
    """

    model: str
    folder: str
    source: Source
    target: EngineSizes
    layers: int = 0
    device: str = "cuda"
    ranks_per_host: int = 8
    colocated: bool = False
    links: tuple[float, float] = (0.0, 0.0)
    transport: str = "auto"
    bucket_bytes: int = 64 << 20
    ignore: tuple[str, ...] = ()
    processes: int = 2
    deadline_seconds: float = 1800.0

    def __post_init__(self) -> None:
        check_transport(self.transport)

    @property
    def trainer_hosts(self) -> tuple[str, ...]:
        """The host of each trainer rank."""
        name = "host" if self.colocated else "trainer host"
        return tuple(f"{name} {rank // self.ranks_per_host}" for rank in range(self.source.trainer_ranks))

    @property
    def engine_hosts(self) -> tuple[str, ...]:
        """The host of each engine rank."""
        name = "host" if self.colocated else "engine host"
        return tuple(f"{name} {rank // self.ranks_per_host}" for rank in range(self.target.engine_ranks))

    @property
    def trainer_devices(self) -> tuple[RankGpuInfo, ...]:
        """The GPU of each trainer rank."""
        return self._devices(self.trainer_hosts)

    @property
    def engine_devices(self) -> tuple[RankGpuInfo, ...]:
        """The GPU of each engine rank: colocated, those of the first trainer ranks."""
        return self._devices(self.engine_hosts)

    def _devices(self, hosts: Sequence[str]) -> tuple[RankGpuInfo, ...]:
        if self.device != "cuda":
            return (RankGpuInfo(),) * len(hosts)
        return tuple(RankGpuInfo(f"GPU {rank % self.ranks_per_host} of {host}") for rank, host in enumerate(hosts))


def _sizes(text: str, option: str, examples: str, known: set[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in known or not size or name in found:
            raise Mismatch(f"{option} {text}: cannot parse {part.strip()!r}; expected {examples}")
        found[name] = size
    return found


def _check_ranks(ranks: int, option: str, text: str) -> None:
    if ranks > _MAX_RANKS:
        raise Mismatch(f"{option} {text}: these are {ranks:,} ranks, of at most {_MAX_RANKS:,}")


def _count(size: str, option: str, text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", size):
        raise Mismatch(f"{option} {text}: {size!r} is not a number of ranks")
    return int(size)
