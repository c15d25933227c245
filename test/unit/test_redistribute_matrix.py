"""`reshard` between any two layouts of one world, as torch's own `redistribute` and `distribute_tensor` lay them out.

The matrices are those that DTensor, torchstore and FSDP2 over tensor parallelism are tested with: every pair of
placements on meshes of one to three dimensions, with ranks in another order, on some of the ranks, in other shard
orders; even, uneven and empty shards. All pairs of a world move in one plan.
"""

import itertools
import logging
import zlib

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from sglang_reshard import ReshardPlan, reshard
from support.sweep import sweep
from support.world import run_world

SHAPES = ((8, 4), (7, 5), (3,), (2, 3, 5))
WORLDS = {
    4: {
        "4": [0, 1, 2, 3], "2x2": [[0, 1], [2, 3]], "2x2 by columns": [[0, 2], [1, 3]], "two": [0, 1],
        "three": [1, 2, 3],
    },
    8: {"8": list(range(8)), "2x2x2": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], "4x2": [[0, 1], [2, 3], [4, 5], [6, 7]]},
}  # fmt: skip
MOST_DIMS = {4: 3, 8: 2}  # of the shapes of a world


def meshes_of(size):
    return {name: DeviceMesh("cpu", torch.tensor(ranks)) for name, ranks in WORLDS[size].items()}


def orders_of(placements):
    """All shard orders: None for the default one."""
    default = DTensorSpec.compute_default_shard_order(placements)
    for mesh_dims in itertools.product(*(itertools.permutations(entry.mesh_dims) for entry in default)):
        order = tuple(ShardOrderEntry(entry.tensor_dim, dims) for entry, dims in zip(default, mesh_dims, strict=True))
        yield None if order == default else order


def placed(whole, mesh, placements, order):
    """The whole tensor in a layout, by torch; None on a rank outside of the mesh."""
    if mesh.get_coordinate() is None:
        return None
    if order is None:
        return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    replicated = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, meta)
    spec = DTensorSpec(mesh, placements, meta, shard_order=order)
    return DTensor(redistribute_local_tensor(whole.clone(), replicated, spec), spec, requires_grad=False)


def layouts_of(size, shape):
    """Name -> (mesh, placements, order)."""
    found = {}
    for name, mesh in meshes_of(size).items():
        for placements in itertools.product([Replicate(), *map(Shard, range(len(shape)))], repeat=mesh.ndim):
            for order in orders_of(placements):
                found[f"{name} {placements} {order}"] = mesh, placements, order
    return found


def values(shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 1


def pairs_of(size, share):
    """Yields (name, source, target, expected target) of all pairs of layouts of each shape, or of one in `share`."""
    for shape in SHAPES:
        if len(shape) > MOST_DIMS[size]:
            continue
        whole, layouts = values(shape), layouts_of(size, shape)
        for a, b in itertools.product(layouts, repeat=2):
            name = f"{shape}: {a} -> {b}"
            if zlib.crc32(name.encode()) % share == 0:
                target, expected = (placed(value, *layouts[b]) for value in (torch.zeros(shape), whole))
                yield name, placed(whole, *layouts[a]), target, expected


def same(a, b):
    return a.shape == b.shape and torch.equal(a, b)


def moved(trainer, share):
    """The pairs whose target is not as torch lays it out, and how many pairs there are."""
    logging.disable(logging.WARNING)
    pairs = list(pairs_of(trainer.size, share))
    plan = ReshardPlan.make(
        [(name, source) for name, source, _, _ in pairs if source is not None],
        [(name, target) for name, _, target, _ in pairs if target is not None],
    )
    plan.run()
    held = [(name, target, expected) for name, _, target, expected in pairs if target is not None]
    wrong = [name for name, target, expected in held if not same(target._local_tensor, expected._local_tensor)]
    for name, source, target, _ in pairs[:: 8 if share > 1 else 1]:
        if source is not None and target is not None and source.device_mesh == target.device_mesh:
            by_torch = redistribute_local_tensor(source._local_tensor, source._spec, target._spec)
            if not same(target._local_tensor, by_torch):
                wrong.append(f"redistribute: {name}")
    return wrong, len(pairs)


@pytest.mark.parametrize(("size", "share", "least"), [(4, 11, 300), sweep(4, 1, 4000), sweep(8, 8, 500)])
def test_every_pair_of_layouts(size, share, least):
    results, _ = run_world(size, 0, moved, None, share, deadline_s=400)
    for wrong, pairs in results:
        assert wrong == []
        assert pairs >= least


# -- FSDP2 over tensor parallelism


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        for number, shape in enumerate(((8, 6), (7, 6), (6, 7), (3, 4), (1, 5), (9,), (1,))):
            self.register_parameter(f"p{number}", nn.Parameter(values(shape) + 100 * number))


def over_tensor_parallel(size, data, dims, zero=False):
    """A module whose parameters tensor parallelism splits along `dims`, in turn, and then FSDP2."""
    mesh = DeviceMesh("cpu", torch.arange(size).view(data, size // data), mesh_dim_names=("data", "tensor"))
    module = Stack()
    for (name, parameter), dim in zip(list(module.named_parameters()), itertools.cycle(dims), strict=False):
        if dim is not None and dim < parameter.dim():
            sharded = distribute_tensor(parameter.detach(), mesh["tensor"], [Shard(dim)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(sharded))
    fully_shard(module, mesh=mesh["data"])
    if zero:
        for parameter in module.parameters():
            parameter._local_tensor.zero_()
    return module


def through_fsdp_and_tensor_parallel(trainer):
    """What is wrong after moves from each such layout into each other one, and into whole tensors."""
    ways = [(data, dims) for data in (1, 2, 4) if trainer.size % data == 0 for dims in ((0,), (1,), (0, 1), (None, 0))]
    wholes = dict(Stack().named_parameters())
    wrong = []
    for source_way in ways:
        source = over_tensor_parallel(trainer.size, *source_way)
        target = {name: torch.zeros(whole.shape) for name, whole in wholes.items()}
        reshard(source, target.items())
        wrong += [(source_way, name) for name in target if not same(target[name], wholes[name])]
    for source_way, target_way in zip(ways, ways[1:] + ways[:1], strict=True):
        source = over_tensor_parallel(trainer.size, *source_way)
        target = over_tensor_parallel(trainer.size, *target_way, zero=True)
        expected = dict(over_tensor_parallel(trainer.size, *target_way).named_parameters())
        reshard(source, target)
        for name, parameter in target.named_parameters():
            if not same(parameter._local_tensor, expected[name]._local_tensor):
                wrong.append((source_way, target_way, name))
    return wrong, 2 * len(ways) * len(wholes)


@pytest.mark.parametrize("size", [4, sweep(8)])
def test_fsdp2_over_tensor_parallelism(size):
    results, _ = run_world(size, 0, through_fsdp_and_tensor_parallel, None, deadline_s=300)
    for wrong, cases in results:
        assert wrong == []
        assert cases >= 82
