"""Models of transformers 5, which stacks experts in one tensor, are sent as the checkpoints that it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources import FusedTensor, checkpoint_tensors, describe
from support.checkpoints import read_weights
from support.checkpoints.tiny_configs import tiny
from support.dtensors import as_rank
from support.live_engines import live_digests, live_engine
from support.plans import assembled_states
from support.sglangs import chosen
from support.sweep import only
from support.trainer_rows import shown
from support.trainers import run_trainers
from tools.oracle.stock import stock_digests

RANKS = 3
# transformers stacks experts of the first in memory only. Of the second it has and saves the same tensors, or renames.
STACKED = (
    "Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM", "AfmoeForCausalLM",
    "Ernie4_5_MoeForCausalLM", "FlexOlmoForCausalLM", "Glm4MoeForCausalLM", "HunYuanMoEV1ForCausalLM",
    "JambaForCausalLM", "Lfm2MoeForCausalLM", "LongcatFlashForCausalLM", "MiniMaxForCausalLM", "MiniMaxM2ForCausalLM",
    "NemotronHForCausalLM", "OlmoeForCausalLM", "PhimoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3NextForCausalLM",
)  # fmt: skip
AS_SAVED = (
    "GptOssForCausalLM", "GraniteMoeForCausalLM", "LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)  # fmt: skip


def made(writer: str) -> transformers.PreTrainedModel:
    """The tiny model of a class, the same on every rank."""
    from transformers.integrations import hub_kernels

    vars(hub_kernels)["_kernels_available"] = False  # some layers would fetch kernels from the Hub
    torch.manual_seed(0)
    cls = getattr(transformers, writer)
    model: transformers.PreTrainedModel = cls(tiny(cls.config_class)).to(torch.bfloat16)
    return model


def sharded(model: Any, mesh: Any) -> Any:
    """Shards every layer, those within layers first."""
    for layers in reversed([m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]):
        for layer in layers:
            if any(True for _ in layer.parameters()) and not hasattr(layer, "set_reshard_after_backward"):
                fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.engine
@pytest.mark.parametrize("writer", only([*STACKED, *AS_SAVED], lambda writer: writer in (STACKED[0], STACKED[2])))
def test_trainer_ranks_hold_what_save_pretrained_writes(writer: str, tmp_path: Path) -> None:
    made(writer).save_pretrained(tmp_path)
    states, fused = [], 0
    for rank in range(RANKS):
        with as_rank(rank, RANKS):
            model = getattr(transformers, writer).from_pretrained(tmp_path, dtype=torch.bfloat16)
            rows = checkpoint_tensors(sharded(model, init_device_mesh("cpu", (RANKS,))))
            states.append(describe(rows, trainer_rank=rank, global_ranks=tuple(range(RANKS))))
            fused = sum(len(row) == 3 and isinstance(row[2], FusedTensor) for row in rows)
    assert bool(fused) == (writer in STACKED)
    expected, found = read_weights(tmp_path), assembled_states(states)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.engine
def test_what_transformers_saves_otherwise_is_refused_by_its_reason() -> None:
    model = made(STACKED[0])
    for attribute, value, says in (
        ("_tp_size", 2, "sharded by transformers' own tensor parallelism"),
        ("hf_quantizer", object(), "is quantized"),
        ("_hf_peft_config_loaded", True, "has adapters"),
    ):
        setattr(model, attribute, value)
        with pytest.raises(Unsupported, match=f"Qwen3MoeForCausalLM {says}|Qwen3MoeForCausalLM is {says}"):
            checkpoint_tensors(model)
        delattr(model, attribute)
    assert checkpoint_tensors(model)


# -- a live engine


CONFIG: dict[str, Any] = {
    "vocab_size": 509, "hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


def trainers_model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**CONFIG))


def three_versions(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Updates before the first optimizer step and after each of two; transformers saves what FSDP2 gathers."""
    folder, model, whole = Path(job["folder"]), trainers_model(), trainers_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for module in model.modules():
        if isinstance(module, Qwen3MoeDecoderLayer):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine: Any = None
    tensors, seen = checkpoint_tensors(model), []
    for version in ("1", "2", "3"):
        if version != "1":
            tokens = torch.arange(24).view(2, 12) + dist.get_rank()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))
        if dist.get_rank() == 0:
            whole.load_state_dict(state)
            whole.save_pretrained(folder / version)
        dist.barrier()
        if engine is None:
            options = {"load_format": "dummy", "skip_tokenizer_init": True, "skip_server_warmup": True}
            engine = live_engine(mesh, folder / version, **options, **job["engine"])
        report = engine.update_weights_from_tensor(tensors, weight_version=version)
        digests = live_digests(engine, folder / f"digests-{version}")
        seen.append({"report": report.as_dict(), "digests": digests})
    engine.shutdown()
    return seen


@pytest.mark.engine
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("sglang", ["pinned", pytest.param("newest", marks=pytest.mark.sweep)])
def test_a_live_engine_has_what_stock_loads_of_what_save_pretrained_writes(
    sglang: str, tmp_path: Path, record_property: Any
) -> None:
    sizes: dict[str, Any] = {"tp_size": 2, "dtype": "float32"}
    with chosen(sglang):
        seen, *_ = run_trainers(RANKS, three_versions, tmp_path, engine=sizes)
        checkpoints = [tmp_path / version for version in ("1", "2", "3")]
        expected = stock_digests(checkpoints[0], checkpoints, **sizes)
    assert [dict(enumerate(version["digests"])) for version in seen] == expected
    assert expected[0] != expected[1] != expected[2]
    for version in seen:
        for rank in version["report"]["engine_ranks"]:
            assert rank["received_bytes"] == rank["least_bytes"] > 0
    assert ["plan" in version["report"]["seconds"] for version in seen] == [True, False, False]
    record_property(
        "trainer", shown("FSDP2, transformers 5, stacked experts", "checkpoint_tensors", "auto", "run", 1.0)
    )
