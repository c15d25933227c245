"""Training states of FSDP2 and tensor parallelism on real process groups. `support.dtensors` has all placements.

Each builder is given the number of trainer ranks and yields `Case`s; they run inside a world (support.world).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@dataclass(frozen=True)
class Case:
    """A named tensor as the trainer holds it, and the whole tensor that it was made from.

    full_tensor_works  False where torch's own waits for ever: FSDP2 over tensor-parallel shards some of which are empty
    """

    name: str
    tensor: torch.Tensor
    whole: torch.Tensor
    full_tensor_works: bool = True


class Block(nn.Module):
    """A small model without anything even about it, but for a matrix whose columns `even` ranks divide."""

    def __init__(self, even: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 6)
        self.down = nn.Linear(6, 8)
        self.experts = nn.Parameter(torch.randn(2, 4 * even, 5))  # [expert, a, b]
        self.wide = nn.Parameter(torch.randn(3, 2 * even))
        self.gate = nn.Parameter(torch.randn(1))  # one element: all ranks but one have none
        self.norm = nn.LayerNorm(8)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.gate * self.down(torch.relu(self.up(x)))
        return self.norm(x) * self.experts.sum() * self.wide.sum()


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same on every rank."""
    numel = torch.Size(shape).numel()
    return (torch.arange(numel, dtype=torch.float64) * 0.37 - 3).to(dtype).view(shape)


def of_module(module: nn.Module, wholes: dict[str, torch.Tensor], prefix: str) -> Iterator[Case]:
    for name, parameter in module.named_parameters():
        yield Case(f"{prefix}.{name}", parameter, wholes[name])


def wholes_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def plain_and_distributed(ranks: int) -> Iterator[Case]:
    mesh = init_device_mesh("cpu", (ranks,))
    buffer = values(40)
    yield Case("mixed.plain", values(3, 4), values(3, 4))
    yield Case("mixed.view", buffer[7:19].view(4, 3), values(40)[7:19].view(4, 3))
    yield Case("mixed.scalar", torch.tensor(4), torch.tensor(4))
    yield Case("mixed.none", torch.empty(0, 3), torch.empty(0, 3))
    yield Case("mixed.sharded", distribute_tensor(values(5, 2), mesh, [Shard(0)], src_data_rank=None), values(5, 2))
    yield Case("mixed.parameter", nn.Parameter(values(2, 2)), values(2, 2))


def not_contiguous(ranks: int) -> Iterator[Case]:
    """Local tensors that are transposed, every other row, or one row many times."""
    mesh = init_device_mesh("cpu", (ranks,))
    whole = values(2 * ranks, 6)
    local = whole.chunk(ranks)[mesh.get_local_rank()]
    doubled = torch.zeros(4, 6)
    doubled[::2] = local
    for name, shard in (("transposed", local.t().contiguous().t()), ("strided", doubled[::2])):
        yield Case(f"odd.{name}", DTensor.from_local(shard, mesh, [Shard(0)], run_check=False), whole)
    yield Case("odd.expanded", values(1, 3).expand(4, 3), values(1, 3).expand(4, 3).contiguous())


def fsdp(ranks: int) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        model = Block(dtype=dtype)
        wholes = wholes_of(model)
        fully_shard(model.up)
        fully_shard(model)
        yield from of_module(model, wholes, f"fsdp.{dtype}")


def fsdp_on_columns(ranks: int) -> Iterator[Case]:
    """Stacked experts and a matrix on dimension 1, as `shard_placement_fn` says; the rest on dimension 0."""
    model = Block(even=ranks)
    wholes, columns = wholes_of(model), (model.experts, model.wide)
    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if any(p is c for c in columns) else None)
    assert model.experts.placements == (Shard(1),)
    yield from of_module(model, wholes, "columns")


def fsdp_with_plain_parameters(ranks: int) -> Iterator[Case]:
    model = Block()
    wholes = wholes_of(model)
    fully_shard(model, ignored_params={model.gate, model.norm.weight})
    assert not isinstance(model.gate, DTensor)
    yield from of_module(model, wholes, "ignored")


def fsdp_offloaded(ranks: int) -> Iterator[Case]:
    model = Block()
    wholes = wholes_of(model)
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    yield from of_module(model, wholes, "offloaded")


def hsdp(ranks: int) -> Iterator[Case]:
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    model = Block()
    wholes = wholes_of(model)
    fully_shard(model, mesh=mesh)
    yield from of_module(model, wholes, "hsdp")


def tensor_parallel_over(model: Block, mesh: DeviceMesh) -> None:
    plan = {"embed": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


def tensor_parallel(ranks: int) -> Iterator[Case]:
    model = Block()
    wholes = wholes_of(model)
    tensor_parallel_over(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))
    yield from of_module(model, wholes, "tp")


def fsdp_over_tensor_parallel(ranks: int) -> Iterator[Case]:
    for dp in sorted({2, ranks // 2}):
        mesh = init_device_mesh("cpu", (dp, ranks // dp), mesh_dim_names=("dp", "tp"))
        model = Block()
        wholes = wholes_of(model)
        tensor_parallel_over(model, mesh["tp"])
        fully_shard(model.up, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        assert "_StridedShard" in str(model.up.weight.placements)
        for case in of_module(model, wholes, f"dp{dp}xtp"):
            # Rows of the one and columns of the other are six: 2, 2, 2 and none.
            empty = mesh["tp"].size() == 4 and (".up." in case.name or ".down.weight" in case.name)
            yield replace(case, full_tensor_works=not empty)


def hsdp_over_tensor_parallel(ranks: int) -> Iterator[Case]:
    names = ("replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", (2, 2, ranks // 4), mesh_dim_names=names)
    model = Block()
    wholes = wholes_of(model)
    tensor_parallel_over(model, mesh["tp"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    yield from of_module(model, wholes, "hsdpxtp")


def flattened_mesh_over_tensor_parallel(ranks: int) -> Iterator[Case]:
    """torchtitan's way: FSDP2 over two dimensions of the mesh, flattened to one."""
    mesh = init_device_mesh("cpu", (2, ranks // 4, 2), mesh_dim_names=("dp", "cp", "tp"))
    flat = mesh["dp", "cp"]._flatten("fsdp")
    model = Block()
    wholes = wholes_of(model)
    tensor_parallel_over(model, mesh["tp"])
    fully_shard(model, mesh=flat)
    yield from of_module(model, wholes, "flattened")


def on_some_ranks(ranks: int) -> Iterator[Case]:
    """A mesh that leaves the first and the last rank out, of a dtype that is not the default."""
    mesh = DeviceMesh("cpu", list(range(1, ranks - 1)))
    for dtype in (torch.float32, torch.bfloat16):
        whole = values(5, 3, dtype=dtype)
        yield Case(f"some.{dtype}", distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None), whole)


BUILDERS: dict[int, list[Callable[[int], Iterator[Case]]]] = {
    3: [fsdp, fsdp_on_columns, fsdp_offloaded, tensor_parallel, plain_and_distributed],
    4: [
        plain_and_distributed, not_contiguous, fsdp, fsdp_with_plain_parameters,
        fsdp_on_columns, hsdp, tensor_parallel, fsdp_over_tensor_parallel, on_some_ranks,
    ],
    5: [fsdp, fsdp_on_columns, tensor_parallel, fsdp_with_plain_parameters],
    6: [hsdp, fsdp_over_tensor_parallel],
    7: [fsdp, fsdp_on_columns, fsdp_offloaded, tensor_parallel, not_contiguous],
    8: [hsdp_over_tensor_parallel, flattened_mesh_over_tensor_parallel, fsdp_over_tensor_parallel],
}  # fmt: skip
