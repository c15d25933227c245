"""Megatron-FSDP's DTensors, whose ranks hold any number of rows, as Megatron-FSDP itself gathers them."""

import logging
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sglang_reshard import reshard
from sglang_reshard.errors import Unsupported
from sglang_reshard.sources import describe
from support.sweep import only
from support.toy import checkpoint
from support.toy_serving import serve
from support.trainer_rows import shown
from support.world import run_world

RANKS, ENGINES, VERSIONS = 4, 2, [1, 2, 3]
# Tensor parallelism splits the columns of the one, leaves the other whole, whose rows are odd, and splits others' rows.
COLUMNS, WHOLE = "down.weight", "embed.weight"
# mesh, its names, tensor parallel dimension, data parallel dimensions, whether the outer one shards too
LAYOUTS = {
    "FSDP": ((4, 1), ("shard", "tp"), False, False),
    "FSDP over tensor parallelism": ((2, 2), ("shard", "tp"), False, False),
    "HSDP": ((2, 2, 1), ("outer", "shard", "tp"), True, False),
    "HSDP, sharded over all": ((2, 2, 1), ("outer", "shard", "tp"), True, True),
}


def megatron_state(layout, version):
    """Name -> DTensor: real buffers of Megatron-FSDP, filled and cut by it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffers
        from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import FSDPDistributedIndex
    logging.disable(logging.WARNING)
    shape, names, hybrid, outer_shards = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data = mesh["outer", "shard"]._flatten("all") if hybrid else mesh["shard"]
    index = FSDPDistributedIndex(
        mesh,
        dp_shard_dim="shard",
        dp_outer_dim="outer" if hybrid else None,
        tp_dim="tp",
        hybrid_fsdp_group=data.get_group() if hybrid else None,
        hsdp_outer_dp_shard=outer_shards,
    )
    parameters = tensor_parallel(version, mesh["tp"])
    options = buffers.DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    if outer_shards:  # the inner dimension splits first
        group, rank = data.get_group(), mesh.get_local_rank("shard") * shape[0] + mesh.get_local_rank("outer")
    else:
        group, rank = mesh["shard"].get_group(), None
    buffer = buffers.DataParallelBuffer(
        options, list(parameters.values()), True, 0, device=torch.device("cpu"), data_parallel_group=group,
        dp_rank=rank, chunk_size_factor=max(p[:1].numel() for p in parameters.values()),
    )  # fmt: skip
    buffer.init_data(torch.zeros(buffer.data_size))
    state = {}
    for number, (name, parameter) in enumerate(parameters.items()):
        buffer.set_item(number, parameter.data)
        state[name] = buffers.make_fsdp_dtensor(
            buffer.get_item(number, only_shard=True), parameter, index, update_uneven_dtensor_chunk_meta=True
        )
    return state


def tensor_parallel(version, mesh):
    """Name -> this rank's parameter, as Megatron-Core's layers mark them."""
    found = {}
    for name, whole in checkpoint(version).items():
        dim = None if mesh.size() == 1 or whole.dim() == 1 or name == WHOLE else int(name == COLUMNS)
        local = whole if dim is None else whole.chunk(mesh.size(), dim)[mesh.get_local_rank()]
        found[name] = parameter = nn.Parameter(local.clone())
        if dim is not None:
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
        elif mesh.size() > 1:
            parameter.tensor_model_parallel, parameter._tp_duplicated = True, True
    return found


def gathered_by_megatron(state):
    """Name -> whole tensor. gloo gathers equal sizes only, so each piece is broadcast in its place."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import gather_uneven_dtensor_to_full_tensor

    def all_gather(pieces, own, group):
        for rank, piece in zip(dist.get_process_group_ranks(group), pieces, strict=True):
            if rank == dist.get_rank():
                piece.copy_(own)
            dist.broadcast(piece, rank, group=group)

    with mock.patch.object(dist, "all_gather", all_gather):
        return {name: gather_uneven_dtensor_to_full_tensor(tensor).to_local() for name, tensor in state.items()}


def train(trainer, layout):
    seen = {}
    state = megatron_state(layout, 0)
    wholes = checkpoint(0)
    seen["uneven"] = any(placed_otherwise(tensor) for tensor in state.values())
    gathered = gathered_by_megatron(state)
    seen["megatron's own"] = all(torch.equal(gathered[name], wholes[name]) for name in gathered)
    try:
        describe(state.items(), trainer_rank=trainer.rank, global_ranks=tuple(range(trainer.size)))
        seen["refused"] = ""
    except Unsupported as error:
        seen["refused"] = str(error)
    target = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
    reshard(state.items(), target.items())
    seen["moved"] = all(torch.equal(target[name], gathered[name]) for name in gathered)
    mesh = init_device_mesh("cpu", (trainer.size,))
    back = {name: distribute_tensor(whole + 1, mesh, [Shard(0)], src_data_rank=None) for name, whole in wholes.items()}
    reshard(back.items(), state.items())
    again = gathered_by_megatron(state)
    seen["moved back"] = all(torch.equal(again[name], wholes[name] + 1) for name in again)
    sender = trainer.sender(timeout_s=180)
    for version in VERSIONS:
        for name, new in megatron_state(layout, version).items():
            state[name]._local_tensor.copy_(new._local_tensor)
        sender.update(state.items(), weight_version=str(version), partial=True, verify="full")
    return seen


def placed_otherwise(tensor):
    """Returns whether torch's placements would be another shape."""
    expected = distribute_tensor(torch.zeros(tensor.shape), tensor.device_mesh, tensor.placements, src_data_rank=None)
    return tensor._local_tensor.shape != expected._local_tensor.shape


@pytest.mark.parametrize("layout", only(LAYOUTS, lambda layout: layout not in ("FSDP", "HSDP")))
def test_its_dtensors_are_read_as_it_gathers_them(layout, record_property):
    trainers, engines = run_world(RANKS, ENGINES, train, serve, layout)
    for rank, seen in enumerate(trainers):
        assert seen["megatron's own"], "the reference does not hold"
        assert seen["moved"]
        assert seen["moved back"]
        assert not seen["refused"] or f"trainer rank {rank}: " in seen["refused"]
    assert any(seen["uneven"] for seen in trainers)
    assert any("Pass partial=True" in seen["refused"] and "ExplicitSharding" in seen["refused"] for seen in trainers)
    assert engines == [VERSIONS] * ENGINES
    record_property("trainer", shown(f"Megatron-FSDP, {layout}", "named_parameters(), partial=True", "ipc", "run"))
