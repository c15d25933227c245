"""Parameters that verl has offloaded are read where they are; nothing is moved to the GPU for a sync. No GPU is needed.

CPU tensors stand for those of a GPU: a runtime says where each of them is.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.runtime import CudaRuntime
from sglang_reshard.verl import driver_hooks, engine_shards
from sglang_reshard.verl.engine_shards import EngineShards, unsupported_reason
from sglang_reshard.verl.training_engine_weights import _get_per_tensor_param
from support.gpu_runtime import replaced_runtime


class Gpu(CudaRuntime):
    """Says that all memory is on a GPU but what is in `on_host`."""

    def __init__(self) -> None:
        super().__init__()
        self.on_host: list[torch.Tensor] = []

    def on_gpu(self, memory: torch.Tensor | torch.UntypedStorage) -> bool:
        assert isinstance(memory, torch.Tensor)
        addresses = [tensor.untyped_storage().data_ptr() for tensor in self.on_host]
        return memory.untyped_storage().data_ptr() not in addresses


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setattr(engine_shards, "_device_name", lambda: "cuda")
    with replaced_runtime(Gpu()) as gpu:
        yield gpu


# -- Megatron


class Ddp(torch.nn.Module):
    """Megatron's wrapper, as far as verl offloads it: parameters are views of a flat buffer after some padding."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.arange(24.0)
        self.module = torch.nn.Module()
        self.module.embedding = torch.nn.Parameter(flat[2:18].view(8, 2))
        self.module.layer = torch.nn.Parameter(flat[18:24].view(3, 2))
        self.buffers = [SimpleNamespace(param_data=flat, grad_data=torch.zeros(24))]  # type: ignore[assignment]
        self.expert_parallel_buffers: list[Any] = []


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> Any:
    """As much of verl's Megatron engine as is read, with verl's own offloading of a wrapper like Megatron's."""
    from verl.utils import megatron_utils

    monkeypatch.setattr(megatron_utils, "DDP", Ddp)
    monkeypatch.setattr(megatron_utils, "get_device_id", lambda: 0)
    monkeypatch.setattr(megatron_utils, "get_torch_device", lambda: SimpleNamespace(empty_cache=lambda: None))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **more: empty(*size, **more))
    probes = SimpleNamespace(make_probe=lambda mapping, module: mapping)
    monkeypatch.setitem(sys.modules, "verl.workers.engine.megatron.delta_export", probes)
    chunk = Ddp()
    tasks = [
        SimpleNamespace(
            global_param_name=name,
            mapping=SimpleNamespace(
                megatron_to_hf=lambda shard, module, name=name: {f"hf.{name}": shard}, hf_param=f"hf.{name}"
            ),
            param_weight=parameter,
            megatron_module=torch.nn.Module(),
        )
        for name, parameter in (("embedding", chunk.module.embedding), ("layer", chunk.module.layer))
    ]
    moves: list[str] = []

    def to(device: str, model: bool, optimizer: bool, grad: bool) -> None:
        assert (model, optimizer, grad) == (True, False, False)
        moves.append(device)
        if device == "cpu":
            megatron_utils.offload_megatron_model_to_cpu([chunk])
        else:
            megatron_utils.load_megatron_model_to_gpu([chunk], load_grad=False)

    config = SimpleNamespace(vocab_size=8)
    return SimpleNamespace(
        bridge=SimpleNamespace(get_conversion_tasks=lambda module: tasks),
        module=[chunk],
        vanilla_bridge=False,
        peft_cls=None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(get_text_config=lambda: config), lora={}),
        is_param_offload_enabled=True,
        _mcore_export_index=None,
        to=to,
        moves=moves,
        chunk=chunk,
    )


@pytest.fixture
def _not_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_shards.fsdp, "is_fsdp", lambda engine: False)


def seen(shards: EngineShards, engine: Any) -> tuple[dict[str, torch.Tensor], bool]:
    with shards.tensors(engine) as (rows, temporary, _):
        return {name: tensor for name, tensor, _ in rows}, temporary


@pytest.mark.usefixtures("_not_fsdp2")
def test_megatrons_parameters_are_read_in_verls_host_copy(megatron: Any, gpu: Gpu) -> None:
    """Points 2 and 10 of the rules of GPUs: it is verl's memory of the last step, at the same address every time."""
    shards = EngineShards(0, 1)
    addresses = []
    for step in range(2):
        flat = megatron.chunk.buffers[0].param_data
        flat.copy_(torch.arange(24.0) + 100 * step)
        megatron.to("cpu", model=True, optimizer=False, grad=False)
        gpu.on_host = [flat.cpu_data]
        megatron.moves.clear()
        assert megatron.chunk.module.layer.untyped_storage().nbytes() == 0
        found, temporary = seen(shards, megatron)
        assert megatron.moves == [], "nothing is moved to the GPU"
        assert not temporary, "the next sync finds the same memory"
        assert torch.equal(found["hf.embedding"], (torch.arange(2.0, 18.0) + 100 * step).view(8, 2))
        assert torch.equal(found["hf.layer"], (torch.arange(18.0, 24.0) + 100 * step).view(3, 2))
        addresses.append([tensor.data_ptr() for tensor in found.values()])
        megatron.to("cuda", model=True, optimizer=False, grad=False)
    assert addresses[0] == addresses[1]


@pytest.mark.usefixtures("_not_fsdp2")
def test_megatrons_parameters_on_the_gpu_are_freed_after_the_sync(megatron: Any) -> None:
    found, temporary = seen(EngineShards(0, 1), megatron)
    assert temporary
    assert megatron.moves == []
    assert found["hf.layer"].data_ptr() == megatron.chunk.module.layer.data_ptr()
    megatron.is_param_offload_enabled = False
    assert not seen(EngineShards(0, 1), megatron)[1]


@pytest.mark.usefixtures("_not_fsdp2")
@pytest.mark.parametrize("unknown", ["another dtype", "no copy"])
def test_megatrons_parameters_without_a_copy_like_them_are_loaded_as_verl_does(
    megatron: Any, monkeypatch: pytest.MonkeyPatch, unknown: str
) -> None:
    megatron.to("cpu", model=True, optimizer=False, grad=False)
    megatron.moves.clear()
    flat = megatron.chunk.buffers[0].param_data
    if unknown == "no copy":
        monkeypatch.setattr(engine_shards.megatron, "values_of", lambda chunks: lambda parameter: parameter.data)
    else:
        flat.cpu_data, kept = flat.cpu_data.double(), flat.cpu_data
    with EngineShards(0, 1).tensors(megatron) as (rows, temporary, _):
        assert megatron.moves == ["cuda"]
        assert temporary
        if unknown == "no copy":
            assert torch.equal(rows[1][1], torch.arange(18.0, 24.0).view(3, 2))
        else:
            flat.cpu_data = kept
    assert megatron.moves == ["cuda", "cpu"]


@pytest.mark.usefixtures("_not_fsdp2")
def test_a_megatron_parameter_that_something_else_has_freed_is_named(megatron: Any) -> None:
    megatron.is_param_offload_enabled = False
    megatron.chunk.module.layer.untyped_storage().resize_(0)
    with pytest.raises(Unsupported, match=r"module\.embedding has no memory on this trainer rank.*Load the parameters"):
        seen(EngineShards(0, 1), megatron)


# -- FSDP2


class Fsdp2Engine(SimpleNamespace):
    def to(self, device: str, **_: Any) -> None:
        self.moves.append(device)


def fsdp2(monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    monkeypatch.setattr(engine_shards.fsdp, "is_fsdp", lambda engine: True)
    module = torch.nn.Linear(2, 3)
    monkeypatch.setattr(
        engine_shards.fsdp.FsdpShards, "tensors", lambda self, engine: list(engine.module.state_dict().items())
    )
    return Fsdp2Engine(
        module=module, moves=[], is_param_offload_enabled=True, model_config=SimpleNamespace(lora={}), **more
    )


def test_fsdp2s_offloaded_parameters_are_read_on_the_host(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    engine = fsdp2(monkeypatch)
    gpu.on_host = list(engine.module.parameters())
    with EngineShards(0, 1).tensors(engine) as (rows, temporary, _):
        assert [row[1].data_ptr() for row in rows] == [p.data_ptr() for p in engine.module.parameters()]
    assert (engine.moves, temporary) == ([], False)


def test_fsdp2s_parameters_on_the_gpu_are_freed_after_the_sync_if_verl_offloads_them(
    monkeypatch: pytest.MonkeyPatch, gpu: Gpu
) -> None:
    engine = fsdp2(monkeypatch)
    with EngineShards(0, 1).tensors(engine) as (_, temporary, _):
        assert temporary
    engine.is_param_offload_enabled = False
    with EngineShards(0, 1).tensors(engine) as (_, temporary, _):
        assert not temporary
    assert engine.moves == []


def test_fsdp2s_own_offloading_is_supported(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """fsdp_config.offload_policy: FSDP2 keeps the shards in pinned memory all the time."""
    engine = fsdp2(monkeypatch, _uses_fsdp2_cpu_offload_policy=True)
    assert unsupported_reason(engine) == ""


# -- what verl's engines return


def test_adapters_that_are_served_come_with_their_description() -> None:
    engine = SimpleNamespace(module=SimpleNamespace(peft_config={}), model_config=SimpleNamespace(lora={}))
    _, peft_config = _get_per_tensor_param(lambda engine: ([], {"r": 8}), engine)
    assert peft_config == {"r": 8}
    engine.model_config.lora = {"merge": True}
    weights, peft_config = _get_per_tensor_param(lambda engine: ([], {"r": 8}), engine)
    assert peft_config is None
    with pytest.raises(Unsupported, match="merge=True"):
        list(weights)


# -- the driver


@pytest.mark.parametrize(("backend", "modes", "settled"), [
    ("reshard", ["STANDALONE", "STANDALONE"], "reshard"),
    ("reshard", ["HYBRID", "HYBRID"], "naive"),
    ("nccl", ["HYBRID"], "nccl"),
])  # fmt: skip
def test_hybrid_replicas_are_synced_as_colocated_ones(
    backend: str, modes: list[str], settled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_hooks, "_pending", {})
    called = []

    async def stock(manager: Any, *args: Any) -> dict[str, float]:
        called.append((manager.backend, *args))
        return {}

    async def taken(_: Any) -> dict[str, float]:
        return {"reshard/seconds": 1.0}

    manager = manager_of(backend, modes)
    worker = SimpleNamespace(__ray_call__=SimpleNamespace(remote=taken))
    manager.actor_wg = SimpleNamespace(workers=[worker])
    seen = {"reshard/seconds": 1.0} if settled == "naive" else {}
    assert asyncio.run(driver_hooks._update_weights(stock, manager, 7)) == seen
    assert called == [(settled, 7)]
    assert driver_hooks._pending == seen


def test_a_manager_of_hybrid_and_standalone_replicas_is_refused_at_once() -> None:
    called = []

    async def stock(manager: Any, *args: Any) -> dict[str, float]:
        called.append(args)
        return {}

    with pytest.raises(Unsupported, match=r"1 of the 2 replicas are hybrid .*: make one of each"):
        asyncio.run(driver_hooks._update_weights(stock, manager_of("reshard", ["STANDALONE", "HYBRID"]), 7))
    assert called == []


def manager_of(backend: str, modes: list[str]) -> SimpleNamespace:
    from verl.workers.rollout.replica import RolloutMode

    return SimpleNamespace(backend=backend, replicas=[SimpleNamespace(rollout_mode=RolloutMode[m]) for m in modes])
