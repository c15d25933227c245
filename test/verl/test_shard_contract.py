"""verl's shard contract as its engines fill it in, by verl's own ShardSpec and converters: the tensors come out.

The engines of VeOmni and torchtitan are not installed here; what they export is built as they build it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from sglang_reshard.errors import ReshardError, Unsupported
from sglang_reshard.sources import TrainerState, describe, fused_slices
from sglang_reshard.verl.shard_contract import ShardContract
from support.partial_states import of_all_ranks
from support.plans import assembled_states

EXPERTS, INNER, HIDDEN, LAYER = 4, 6, 5, "model.layers.3.mlp"
EP, FSDP = 2, 3


@functools.cache
def _veomni_utils() -> ModuleType:
    """verl's converters of VeOmni's experts. They need no VeOmni, but the package around them does."""
    package = Path(importlib.util.find_spec("verl").origin).parent
    spec = importlib.util.spec_from_file_location("veomni_utils", package / "workers/engine/veomni/utils.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.get_device_id = lambda: "cpu"  # where the converters move experts to
    return module


class Engine:
    """As much of a training engine as exports shards."""

    def __init__(self, exported: list[tuple[str, torch.Tensor, Any]]) -> None:
        self.exported = exported

    def get_per_tensor_param_shard(self) -> tuple[Any, None]:
        return iter(self.exported), None


def described(ranks: int, exported: Callable[[int], list[Any]]) -> list[TrainerState]:
    """What the trainer ranks make of their exports together."""
    return of_all_ranks([ShardContract(ranks).tensors(Engine(exported(rank))) for rank in range(ranks)])


def veomni(rank: int, stack: torch.Tensor) -> list[Any]:
    """Experts split by hand over EP, and each rank's experts by FSDP2 along dimension 1, as VeOmni exports them."""
    from verl.workers.engine.spec import BlockPlacement, ShardSpec

    name, handler = f"{LAYER}.experts.gate_up_proj", _veomni_utils().get_moe_param_handler("qwen3_moe", True)
    ep, fsdp = divmod(rank, FSDP)
    experts = EXPERTS // EP
    columns = [c.start for c in _chunks(2 * INNER, FSDP)] + [2 * INNER]
    start, stop = columns[fsdp], columns[fsdp + 1]
    block = stack[ep * experts : (ep + 1) * experts, start:stop]
    spec = ShardSpec(
        full_shape=tuple(stack.shape),
        place=BlockPlacement(tuple(block.shape), (ep * experts, start, 0), tuple(stack.shape)),
        gather_group=object(),
        to_hf_chunk=lambda first, rows: list(handler(name, rows, expert_id_base=first)),
        hf_slots=_veomni_utils().enumerate_hf_slots(handler, name, tuple(stack.shape), stack.dtype),
    )
    dense = ShardSpec(full_shape=(3,))
    return [(f"{LAYER}.gate.weight", torch.arange(3.0), dense), (name, block.reshape(-1), spec)]


def _chunks(length: int, parts: int) -> list[slice]:
    size = -(-length // parts)
    return [slice(min(i * size, length), min((i + 1) * size, length)) for i in range(parts)]


def test_blocks_and_a_converter_as_veomni_exports_them() -> None:
    stack = torch.randn(EXPERTS, 2 * INNER, HIDDEN)
    found = assembled_states(described(EP * FSDP, lambda rank: veomni(rank, stack)))
    expected = {f"{LAYER}.gate.weight": torch.arange(3.0)}
    for e in range(EXPERTS):
        expected[f"{LAYER}.experts.{e}.gate_proj.weight"] = stack[e, :INNER]
        expected[f"{LAYER}.experts.{e}.up_proj.weight"] = stack[e, INNER:]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_shardings_are_the_same_objects_until_a_block_moves() -> None:
    contract, stack = ShardContract(EP * FSDP), torch.randn(EXPERTS, 2 * INNER, HIDDEN)
    first, again, other = (contract.tensors(Engine(veomni(rank, stack)))[1][2].spec for rank in (0, 0, 1))
    assert first is again
    assert first.shard_map.shards[0].box != other.shard_map.shards[0].box


def test_a_rank_with_an_empty_block_does_not_list_the_tensor() -> None:
    from verl.workers.engine.spec import BlockPlacement, ShardSpec

    def exported(rank: int) -> list[Any]:
        rows, start = (3, 0) if rank == 0 else (0, 3)
        place = BlockPlacement((rows, 2), (start, 0), (3, 2))
        return [("w", torch.ones(2 * rows), ShardSpec((3, 2), place=place, gather_group=object())),
                ("b", torch.ones(1), ShardSpec((1,)))]  # fmt: skip

    assert torch.equal(assembled_states(described(2, exported))["w"], torch.ones(3, 2))


def test_an_expert_stack_row_by_row_as_torchtitan_exports_it() -> None:
    from verl.workers.engine.spec import ShardSpec

    stack = torch.randn(EXPERTS, INNER, HIDDEN)
    slots = [(f"{LAYER}.experts.{e}.up_proj.weight", (INNER, HIDDEN)) for e in range(EXPERTS)]

    def exported(rank: int) -> list[Any]:
        return [("layers.3.moe.experts.w3", stack.reshape(-1), ShardSpec(tuple(stack.shape), hf_slots=slots))]

    found = assembled_states(described(2, exported))
    assert [found[name].tolist() for name, _ in slots] == stack.tolist()


def test_what_says_nothing_of_a_shape_is_refused_by_name() -> None:
    from verl.workers.engine.spec import ShardSpec

    flat = [("some.weight", torch.zeros(6), ShardSpec((2, 3), place=0, gather_group=object()))]
    with pytest.raises(Unsupported, match=r"some\.weight.*flat offset"):
        ShardContract(1).tensors(Engine(flat))


def test_an_engine_without_shards_is_refused_by_its_name() -> None:
    from verl.workers.engine.base import BaseEngine

    with pytest.raises(ReshardError, match=r"BaseEngine\.get_per_tensor_param_shard is not implemented"):
        ShardContract(1).tensors(BaseEngine())


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[dict[str, Any]]:
    """This process plays one rank of a world; what `describe` has to be told of it."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield {"trainer_rank": rank, "global_ranks": tuple(range(size))}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(0), Shard(1))])
@pytest.mark.parametrize("rank", range(6))
def test_a_shard_spec_describes_what_its_dtensor_describes(placements: tuple[object, ...], rank: int) -> None:
    from verl.workers.engine.spec import ShardSpec

    with as_rank(rank, 6) as ranks:
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("fsdp", "tp"))
        tensor = distribute_tensor(torch.arange(35.0).view(7, 5), mesh, placements, src_data_rank=None)
        flat = tensor.to_local().reshape(-1)
        by_spec = describe([("w", flat, ShardSpec.from_param(tensor))], **ranks)
        by_dtensor = describe([("w", tensor)], **ranks)
    assert by_spec.layout == by_dtensor.layout
    assert torch.equal(by_spec.shards[0], by_dtensor.shards[0])


@pytest.mark.parametrize("name", ["model.layers.3.mlp.experts.gate_up_proj", "model.layers.3.mlp.experts.down_proj"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_the_slots_of_verls_own_converters(name: str, model_type: str) -> None:
    handler = _veomni_utils().get_moe_param_handler(model_type, True)
    whole = torch.arange(3 * 8 * 6, dtype=torch.bfloat16).view(3, 8, 6)
    table = _veomni_utils().enumerate_hf_slots(handler, name, whole.shape, whole.dtype)
    parts = fused_slices(table, whole.shape, lambda start, rows: list(handler(name, rows, expert_id_base=start)))
    made = {n: t for e in range(3) for n, t in handler(name, whole[e : e + 1], expert_id_base=e)}
    assert [n for n, _ in parts] == list(made)
    for part_name, part in parts:
        bounds = enumerate(zip(part.start, part.stop, strict=True))
        box = tuple(slice(a, b) if axis in part.axes else a for axis, (a, b) in bounds)
        assert torch.equal(whole[box], made[part_name])
