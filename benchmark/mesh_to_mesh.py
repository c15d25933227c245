"""Between two layouts on the same four ranks, beside torch's own ways: `python -m benchmark.mesh_to_mesh`.

The ways move the same tensors in one run, in turns, on gloo and without a GPU. Every element of the source changes
before every move, outside of the timed part; then all ranks wait at a barrier, and the time of a move is that of the
slowest rank. The first move of each way is not counted.

reshard            `ReshardPlan.run`; the plan, made once, has a column of its own
redistribute       `DTensor.redistribute` of each tensor, then a copy into the target; both layouts need one mesh
checkpoint         `torch.distributed.checkpoint`: `save` to /dev/shm, then `load` into the target
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from benchmark import pages, results
from benchmark.results import Rows
from benchmark.world import run_world, slowest
from sglang_reshard import ReshardPlan

RANKS, UPDATES, DEADLINE_S = 4, 9, 600.0
Tensors = dict[str, DTensor]


class Size(NamedTuple):
    """How many matrices of which shape (elements, bfloat16)."""

    tensors: int = 200
    shape: tuple[int, int] = (1024, 512)


class Layout(NamedTuple):
    """Shape of the mesh, and placements of the matrices with even and with odd numbers."""

    mesh: tuple[int, ...]
    even: tuple[Placement, ...]
    odd: tuple[Placement, ...]


ROWS, COLUMNS = Shard(0), Shard(1)
FSDP = Layout((RANKS,), (ROWS,), (ROWS,))
CASES = {
    "fsdp=4 -> tp=4 on columns": (FSDP, Layout((RANKS,), (COLUMNS,), (COLUMNS,))),
    "fsdp=4 -> tp=4, half of the matrices on columns": (FSDP, Layout((RANKS,), (ROWS,), (COLUMNS,))),
    "fsdp=4 -> dp=2 x tp=2": (FSDP, Layout((2, 2), (Replicate(), ROWS), (Replicate(), COLUMNS))),
}


def distributed(layout: Layout, mesh: DeviceMesh, size: Size) -> Tensors:
    """The same matrices of random bits on every rank; nothing is sent."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for i in range(size.tensors):
        whole = torch.randint(-(1 << 15), 1 << 15, size.shape, generator=generator, dtype=torch.int16)
        placements = layout.odd if i % 2 else layout.even
        found[f"layers.{i}.weight"] = distribute_tensor(
            whole.view(torch.bfloat16), mesh, placements, src_data_rank=None
        )
    return found


def bits(tensor: DTensor) -> torch.Tensor:
    return tensor.to_local().view(torch.int16)


def change(tensors: Tensors) -> None:
    """Counts every element up by one, as an integer."""
    for tensor in tensors.values():
        bits(tensor).add_(1)


def by_redistribute(source: Tensors, target: Tensors) -> None:
    for name, tensor in target.items():
        moved = source[name].redistribute(tensor.device_mesh, tensor.placements)
        tensor.to_local().copy_(moved.to_local())


def by_checkpoint(folder: Path, source: Tensors, target: Tensors) -> None:
    dcp.save(dict(source), checkpoint_id=folder)
    dcp.load(dict(target), checkpoint_id=folder)


def most(number: int) -> int:
    """Returns the greatest of all ranks' numbers."""
    found = torch.tensor([number])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def measure_case(case: str, size: Size, moves: int, folder: Path) -> Rows:
    """Collective. A row for each way.

    bytes           of all tensors, replicas not counted
    received_bytes  by the rank that is sent most
    extra_bytes     of the buffers of the rank that has most
    """
    before, after = CASES[case]
    meshes = {layout.mesh: init_device_mesh("cpu", layout.mesh) for layout in (before, after)}
    source = distributed(before, meshes[before.mesh], size)
    expected, target = (distributed(after, meshes[after.mesh], size) for _ in range(2))
    plan, plan_seconds = slowest(lambda: ReshardPlan.make(source.items(), target.items()))
    ways: dict[str, Callable[[], None]] = {"reshard": plan.run}
    if before.mesh == after.mesh:
        ways["redistribute"] = lambda: by_redistribute(source, target)
    ways["checkpoint"] = lambda: by_checkpoint(folder, source, target)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    exact = dict.fromkeys(ways, True)
    for _ in range(moves + 1):
        for way, move in ways.items():
            change(source)
            change(expected)
            seconds[way].append(slowest(move)[1])
            equal = all(torch.equal(bits(target[name]), bits(wanted)) for name, wanted in expected.items())
            exact[way] &= not most(not equal)
    of_the_plan = {
        "plan_seconds": plan_seconds,
        "received_bytes": most(plan.received_bytes),
        "extra_bytes": most(plan.extra_bytes),
    }
    return [
        {
            "case": case,
            "way": way,
            "seconds_median": statistics.median(times[1:]),
            "seconds_min": min(times[1:]),
            **(of_the_plan if way == "reshard" else dict.fromkeys(of_the_plan)),
            "tensors": size.tensors,
            "bytes": sum(t.numel() * t.element_size() for t in source.values()),
            "moves": moves,
            "bit_exact": exact[way],
        }
        for way, times in seconds.items()
    ]


def train(_: Any, size: Size, moves: int, folder: str) -> Rows:
    warnings.filterwarnings("ignore", module="torch")
    return [row for case in CASES for row in measure_case(case, size, moves, Path(folder))]


def measure(size: Size, moves: int) -> Rows:
    """Measures all cases, on ranks of its own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (rows, *_), _ = run_world("benchmark.mesh_to_mesh", RANKS, 0, size, moves, folder, deadline_s=DEADLINE_S)
        return rows


def main() -> None:
    rows = measure(Size(), UPDATES)
    pages.publish("mesh-to-mesh", "python -m benchmark.mesh_to_mesh", rows, [results.load_of_host()])


if __name__ == "__main__":
    main()
