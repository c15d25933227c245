"""bfloat16 into a block-fp8 engine, beside verl's way for `rollout.quantization=fp8`: `python -m benchmark.block_fp8`.

Trainer ranks hold FSDP2's shards of a dense model's matrices; processes stand in for engine ranks, which keep
float8_e4m3fn weights and a float32 scale for each block of 128 x 128. Every shard changes before every update, outside
of the timed part; an update takes as long as on the slowest trainer rank. The first two are not counted.

ipc, p2p  `WeightSender.update`: engine ranks take the blocks that they need, and quantize them
verl      all trainer ranks gather each tensor, as verl does; one quantizes it by verl's function and copies it into
          shared memory, from which as many processes as there are engine ranks load it as SGLang's loaders do. Fewer
          steps than verl's: its trainer ranks all quantize, and its tensors reach the engine through HTTP and handles
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmark import pages
from benchmark.results import Row, Rows
from benchmark.world import digest, run_world, sender, slowest, updates

BLOCK = (128, 128)
TRAINERS, ENGINES = 4, 2
OURS = ("ipc", "p2p")
WARMUPS, DEADLINE_S = 2, 400.0


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model, and how many updates are counted: by this package, and by verl."""

    hidden: int = 1024
    wide: int = 3072
    layers: int = 8
    updates: int = 10
    verl_updates: int = 3

    def matrices(self) -> dict[str, tuple[tuple[int, int], int]]:
        """Returns shapes by name, each with the dimension that an engine's ranks cut."""
        square, across, down = (self.hidden, self.hidden), (self.wide, self.hidden), (self.hidden, self.wide)
        columns = {"q": square, "k": square, "v": square, "gate": across, "up": across}
        of = {name: (shape, 0) for name, shape in columns.items()} | {"o": (square, 1), "down": (down, 1)}
        return {f"layers.{n}.{name}.weight": of[name] for n in range(self.layers) for name in of}


class _Linear(torch.nn.Module):
    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        weight = torch.zeros(shape).to(torch.float8_e4m3fn)
        scales = torch.zeros([n // b for n, b in zip(shape, BLOCK, strict=True)])
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = torch.nn.Parameter(scales, requires_grad=False)
        self.quant_method = SimpleNamespace(quant_config=SimpleNamespace(weight_block_size=BLOCK))


class _Rank(torch.nn.Module):
    """One engine rank's part of each matrix, in block-fp8."""

    def __init__(self, rank: int, size: Size) -> None:
        super().__init__()
        self._rank, self._matrices = rank, size.matrices()
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict() for _ in range(size.layers))
        for name, (shape, dim) in self._matrices.items():
            _, layer, matrix, _ = name.split(".")
            part = [n // ENGINES if d == dim else n for d, n in enumerate(shape)]
            self.layers[int(layer)][matrix] = _Linear((part[0], part[1]))  # type: ignore[operator]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            _, dim = self._matrices[name.removesuffix("_scale_inv")]
            self.get_parameter(name).data.copy_(tensor.chunk(ENGINES, dim)[self._rank])


def train(trainer: Any, size: Size) -> Row:
    mesh = init_device_mesh("cpu", (TRAINERS,))
    state = {
        name: DTensor.from_local(
            torch.zeros(shape[0] // TRAINERS, shape[1], dtype=torch.bfloat16), mesh, [Shard(0)], run_check=False
        )
        for name, (shape, _) in size.matrices().items()
    }
    seconds: dict[str, list[float]] = {}
    peaks = {}
    for way in OURS:
        sending = sender(trainer, way)
        for update in range(WARMUPS + size.updates):
            _step(state, update, trainer.rank)
            report, took = slowest(partial(sending.update, state.items()))
            seconds.setdefault(way, []).append(took)
        peaks[way] = max(engine_rank.peak_extra_bytes for engine_rank in report.engine_ranks)
        sending.close()
    by_verl = _VerlsWay(trainer.rank, size)
    for update in range(size.updates - size.verl_updates, WARMUPS + size.updates):  # and so to the same weights
        _step(state, update, trainer.rank)
        seconds.setdefault("verl", []).append(slowest(lambda: by_verl.update(state))[1])
    return {"seconds": seconds, "peaks": peaks, "digest": by_verl.digest()}


def _step(state: dict[str, DTensor], update: int, trainer_rank: int) -> None:
    for number, tensor in enumerate(state.values()):
        generator = torch.Generator().manual_seed(10_000 * update + 100 * number + trainer_rank)
        tensor.to_local().normal_(generator=generator)


class _VerlsWay:
    """The first trainer ranks load what engine ranks would: memory that all of them share, given by rank 0."""

    def __init__(self, rank: int, size: Size) -> None:
        from verl.utils.kernel.fp8_kernel import _scaled_fp8_blockwise_pytorch

        self._quantize, self._first = _scaled_fp8_blockwise_pytorch, rank == 0  # its Triton kernel wants a GPU
        self._model = _Rank(rank, size) if rank < ENGINES else None
        shared = []
        if self._first:
            for name, (shape, _) in size.matrices().items():
                weight = torch.zeros(shape).to(torch.float8_e4m3fn).share_memory_()
                scales = torch.zeros([n // b for n, b in zip(shape, BLOCK, strict=True)]).share_memory_()
                shared += [(name, weight), (f"{name}_scale_inv", scales)]
        pickled: list[Any] = [_pickled(shared) if self._first else None]
        dist.broadcast_object_list(pickled, src=0)
        self._shared = dict(shared) if self._first else dict(_unpickled(pickled[0])) if self._model else {}
        dist.barrier()

    def update(self, state: dict[str, DTensor]) -> None:
        for name, tensor in state.items():
            whole = tensor.full_tensor()
            if self._first:
                quantized, scales = self._quantize(whole, list(BLOCK))
                self._shared[name].copy_(quantized)
                self._shared[f"{name}_scale_inv"].copy_(scales.squeeze(-1))
        dist.barrier()
        if self._model is not None:
            self._model.load_weights(self._shared.items())
        dist.barrier()

    def digest(self) -> str:
        return digest(self._model.parameters()) if self._model is not None else ""


def _pickled(tensors: Any) -> bytes:
    from multiprocessing.reduction import ForkingPickler

    torch.multiprocessing.set_sharing_strategy("file_system")
    return bytes(ForkingPickler.dumps(tensors))


def _unpickled(data: bytes) -> Any:
    from multiprocessing.reduction import ForkingPickler

    return ForkingPickler.loads(data)


def serve(rank: int, ranks: int, requests: Any, size: Size) -> dict[str, str]:
    """Digests of the engine rank after the last update of each way."""
    model, digests = _Rank(rank, size), {}
    for request in updates(model, rank, ranks, requests):
        if request.update == WARMUPS + size.updates:
            digests[request.transport] = digest(model.parameters())
    return digests


def run(size: Size) -> Rows:
    """A row for each way. peak_extra_bytes is an engine rank's in the last update; verl's are not measured."""
    trainers, engines = run_world("benchmark.block_fp8", TRAINERS, ENGINES, size, deadline_s=DEADLINE_S)
    by_verl = [trainers[rank]["digest"] for rank in range(ENGINES)]
    return [
        {
            "way": way,
            "updates": len(seconds) - WARMUPS,
            "tensors": len(size.matrices()),
            "bytes": sum(2 * a * b for (a, b), _ in size.matrices().values()),
            "seconds_median": statistics.median(seconds[WARMUPS:]),
            "first_seconds": seconds[0],
            "peak_extra_bytes": trainers[0]["peaks"].get(way),
            "bit_exact": way not in OURS or [digests[way] for digests in engines] == by_verl,
        }
        for way, seconds in trainers[0]["seconds"].items()
    ]


def main() -> int:
    rows = run(Size())
    pages.publish("block-fp8", "python -m benchmark.block_fp8", rows)
    return 0 if all(row["bit_exact"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
