"""Between two layouts on the same four ranks, beside torch's own ways: `python -m benchmark.mesh_to_mesh`.

The ways move the same tensors in one run, in turns, on gloo and without a GPU. Every element of the source changes
before every move, outside of the timed part; then all ranks wait at a barrier, and the time of a move is that of the
slowest rank. The first move of each way is not counted.

reshard            `ReshardPlan.run`; the plan, made once, has a column of its own
redistribute       `DTensor.redistribute` of each tensor, then a copy into the target; both layouts need one mesh
checkpoint         `torch.distributed.checkpoint`: `save` to /dev/shm, then `load` into the target
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from benchmark import results
from sglang_reshard import ReshardPlan

RANKS, UPDATES = 4, 9
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


class MoveRow(msgspec.Struct, frozen=True):
    """One way of one case. Seconds are of a move; None where a figure is not this way's.

    bytes           of all tensors, replicas not counted
    received_bytes  by the rank that is sent most; least_bytes is what that rank lacks
    extra_bytes     of the buffers of the rank that has most
    """

    case: str
    way: str
    seconds_median: float
    seconds_min: float
    plan_seconds: float | None
    received_bytes: int | None
    extra_bytes: int | None
    tensors: int
    bytes: int
    moves: int
    bit_exact: bool


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


def seconds_of(move: Callable[[], object]) -> float:
    """Returns the time of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    move()
    slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def most(number: int) -> int:
    """Returns the greatest of all ranks' numbers."""
    found = torch.tensor([number])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def measure_case(case: str, size: Size, moves: int, folder: Path) -> list[MoveRow]:
    """Collective."""
    before, after = CASES[case]
    meshes = {layout.mesh: init_device_mesh("cpu", layout.mesh) for layout in (before, after)}
    source = distributed(before, meshes[before.mesh], size)
    expected, target = (distributed(after, meshes[after.mesh], size) for _ in range(2))
    plans: list[ReshardPlan] = []
    plan_seconds = seconds_of(lambda: plans.append(ReshardPlan.make(source.items(), target.items())))
    ways: dict[str, Callable[[], None]] = {"reshard": plans[0].run}
    if before.mesh == after.mesh:
        ways["redistribute"] = lambda: by_redistribute(source, target)
    ways["checkpoint"] = lambda: by_checkpoint(folder, source, target)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    exact = dict.fromkeys(ways, True)
    for _ in range(moves + 1):
        for way, move in ways.items():
            change(source)
            change(expected)
            seconds[way].append(seconds_of(move))
            equal = all(torch.equal(bits(target[name]), bits(wanted)) for name, wanted in expected.items())
            exact[way] &= not most(not equal)
    plan = plans[0]
    received, extra = most(plan.received_bytes), most(plan.extra_bytes)
    return [
        MoveRow(
            case=case,
            way=way,
            seconds_median=statistics.median(times[1:]),
            seconds_min=min(times[1:]),
            plan_seconds=plan_seconds if way == "reshard" else None,
            received_bytes=received if way == "reshard" else None,
            extra_bytes=extra if way == "reshard" else None,
            tensors=size.tensors,
            bytes=sum(t.numel() * t.element_size() for t in source.values()),
            moves=moves,
            bit_exact=exact[way],
        )
        for way, times in seconds.items()
    ]


def _worker(rank: int, size: Size, moves: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    rows = [row for case in CASES for row in measure_case(case, size, moves, folder / "checkpoint")]
    if rank == 0:
        (folder / "rows.json").write_bytes(msgspec.json.encode(rows))
    dist.destroy_process_group()


def measure(size: Size, moves: int) -> list[MoveRow]:
    """Measures all cases, on ranks of its own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        mp.spawn(_worker, (size, moves, Path(folder)), nprocs=RANKS)
        return msgspec.json.decode((Path(folder) / "rows.json").read_bytes(), type=list[MoveRow])


def main() -> None:
    rows = measure(Size(), UPDATES)
    for row in rows:
        print(f"{row.case}, {row.way}: {row.seconds_median:.3f} s, {'bit-exact' if row.bit_exact else 'DIFFERENT'}")
    load = f"The host's {os.cpu_count()} cores had a load of {os.getloadavg()[0]:.1f}, this run included."
    results.save(results.FOLDER / "mesh_to_mesh.json", results.header("python -m benchmark.mesh_to_mesh", [load]), rows)


if __name__ == "__main__":
    main()
