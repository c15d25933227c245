"""One engine rank's loader as a file: which elements of which trainer shards it copies where, without SGLang.

Made by `benchmark.gpu.record` where SGLang is installed, and read where it need not be. What is left of the loader's
program are its copies; fills and expressions, which no bytes travel for, are not part of it.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import msgspec
import torch

from sglang_reshard.layout.decoders import inflate
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan import RankLocation, ReadPlan, TensorIndex, plan_reads
from sglang_reshard.trace.program import Copy, Program

FOLDER = Path(__file__).parent / "recorded"
_MAX_BYTES = 1 << 28


class Recording(msgspec.Struct, frozen=True):
    """One engine rank of a model.

    model, source, target  as `sglang-reshard plan` names them; layers: that were traced, 0 for all
    engine_rank            of `engine_ranks`
    layout                 what each trainer rank holds
    targets                storages that are written to: name -> (elements, dtype)
    copies                 checkpoint elements -> storages
    """

    model: str
    source: str
    target: str
    layers: int
    engine_rank: int
    engine_ranks: int
    layout: SourceLayout
    targets: dict[str, tuple[int, str]]
    copies: tuple[Copy, ...]

    def program(self, device: torch.device) -> Program:
        """Returns the copies with new target storages on `device`."""
        targets = {
            name: torch.zeros(numel, dtype=getattr(torch, dtype), device=device)
            for name, (numel, dtype) in self.targets.items()
        }
        return Program(self.copies, targets)

    def read_plan(self, index: TensorIndex, host: str) -> ReadPlan:
        """Returns what this engine rank reads if all trainer ranks are on `host`."""
        hosts = (host,) * self.layout.trainer_ranks
        return plan_reads(index, self.copies, RankLocation(self.engine_rank, self.engine_ranks, host, hosts))


def save(path: Path, recording: Recording) -> int:
    """Writes a recording. Returns the bytes of the file."""
    data = zlib.compress(msgspec.msgpack.encode(recording), 9)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return len(data)


def load(path: Path) -> Recording:
    return msgspec.msgpack.decode(inflate(path.read_bytes(), _MAX_BYTES, path.name), type=Recording)


def recorded() -> dict[str, Path]:
    """Returns name -> file of all recordings of the repository."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.program"))}
