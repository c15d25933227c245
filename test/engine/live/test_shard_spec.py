"""verl's own ShardSpec, as its training engines export it, is read like the DTensor it was made from."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
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

from sglang_reshard.sources import FusedSlice, FusedTensor, describe, fused_slices

pytestmark = pytest.mark.engine


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


@pytest.mark.parametrize("rank", range(2))
def test_a_shard_spec_with_slots_describes_what_its_stack_describes(rank: int) -> None:
    """As torchtitan's engine exports its experts: each row a tensor."""
    from verl.workers.engine.spec import ShardSpec

    with as_rank(rank, 2) as ranks:
        tensor = distribute_tensor(
            torch.arange(60.0).view(3, 4, 5), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
        )
        spec = ShardSpec.from_param(tensor)
        spec.hf_slots = [(f"experts.{e}", (4, 5)) for e in range(3)]
        stack = FusedTensor(tuple((f"experts.{e}", FusedSlice((e, 0, 0), (e + 1, 4, 5), (1, 2))) for e in range(3)))
        by_spec = describe([("w", tensor.to_local().reshape(-1), spec)], **ranks)
        by_dtensor = describe([("w", tensor, stack)], **ranks)
    assert by_spec.layout == by_dtensor.layout
    assert all(map(torch.equal, by_spec.shards, by_dtensor.shards))


def veomni_utils() -> ModuleType:
    """verl's module, which imports without veomni; its package does not."""
    import verl.workers.engine.spec

    path = Path(verl.workers.engine.spec.__file__).parent / "veomni" / "utils.py"
    spec = importlib.util.spec_from_file_location("veomni_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["model.layers.3.mlp.experts.gate_up_proj", "model.layers.3.mlp.experts.down_proj"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_the_slots_of_verls_own_converters(name: str, model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = veomni_utils()
    monkeypatch.setattr(utils, "get_device_id", lambda: "cpu")
    handler = utils.get_moe_param_handler(model_type, True)
    whole = torch.arange(3 * 8 * 6, dtype=torch.bfloat16).view(3, 8, 6)
    table = utils.enumerate_hf_slots(handler, name, whole.shape, whole.dtype)
    parts = fused_slices(table, whole.shape, lambda start, rows: list(handler(name, rows, expert_id_base=start)))
    made = {n: t for e in range(3) for n, t in handler(name, whole[e : e + 1], expert_id_base=e)}
    assert [n for n, _ in parts] == list(made)
    for part_name, part in parts:
        bounds = enumerate(zip(part.start, part.stop, strict=True))
        box = tuple(slice(a, b) if axis in part.axes else a for axis, (a, b) in bounds)
        assert torch.equal(whole[box], made[part_name])
