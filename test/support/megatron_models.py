"""Tiny Megatron-Core models on CPU that hold the weights of a transformers model.

The way here, from checkpoint tensors to shards, is written from Megatron-Core's layout and shares nothing with the
converters of `megatron_bridge`, which go the other way. That both models give the same logits shows it to be right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY = 61
_HIDDEN, _HEAD, _HEADS, _MLP = 24, 8, 4, 20


@dataclass(frozen=True)
class Case:
    """A model (`kind` as transformers calls it) and how it is spread over the trainer ranks.

    tp, pp, ep, etp  sizes: tensor, pipeline, expert and expert tensor parallel
    groups           heads with a key and value of their own
    """

    kind: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    groups: int = 2
    tied: bool = False

    @property
    def experts(self) -> int | None:
        return 4 if self.kind == "qwen3_moe" else None


def reference(case: Case) -> transformers.PreTrainedModel:
    """The transformers model, the same on every rank."""
    torch.manual_seed(7)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": 2,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": case.groups,
        "head_dim": _HEAD,
        "max_position_embeddings": 64,
        "tie_word_embeddings": case.tied,
    }
    if case.kind == "qwen2":
        config = transformers.Qwen2Config(**sizes)
        model = transformers.Qwen2ForCausalLM(config)
    elif case.kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    else:
        experts = {"num_experts": case.experts, "num_experts_per_tok": 2, "moe_intermediate_size": _MLP}
        config = transformers.Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True)
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def checkpoint(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Its tensors as in a checkpoint: each expert by itself, a tied output layer left out."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                prefix = f"{name.removesuffix('gate_up_proj')}{expert}."
                tensors[f"{prefix}gate_proj.weight"], tensors[f"{prefix}up_proj.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                tensors[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = down
        else:
            tensors[name] = tensor
    return tensors


@contextlib.contextmanager
def parallel(case: Case) -> Iterator[None]:
    """Megatron-Core's process groups of a case, over all ranks."""
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )
    try:
        yield
    finally:
        mpu.destroy_model_parallel()


def megatron_model(case: Case, tensors: dict[str, torch.Tensor]) -> GPTModel:
    """This rank's part of a Megatron-Core model with the weights of a checkpoint."""
    initialize_rng_tracker(inference_rng_tracker=True)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=_HIDDEN,
        num_attention_heads=_HEADS,
        num_query_groups=case.groups,
        kv_channels=_HEAD,
        ffn_hidden_size=_MLP,
        activation_func=F.silu,
        gated_linear_unit=True,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        qk_layernorm=case.kind != "qwen2",
        add_bias_linear=False,
        add_qkv_bias=case.kind == "qwen2",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        pipeline_dtype=torch.float32,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        num_moe_experts=case.experts,
        moe_ffn_hidden_size=_MLP if case.experts else None,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        use_cpu_initialization=True,
        # Its fused kernels are for GPUs.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(num_experts=case.experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        vocab_size=-(-VOCABULARY // (2 * case.tp)) * 2 * case.tp,
        max_sequence_length=64,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="rope",
        rotary_base=10_000,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_shard(model, name, tensors, case, parameter.shape))
    return model.eval()


def _shard(model: GPTModel, name: str, tensors: dict[str, torch.Tensor], case: Case, shape: torch.Size) -> torch.Tensor:
    """What a Megatron parameter holds on this rank."""
    tp, rank = case.tp, mpu.get_tensor_model_parallel_rank()
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        whole = tensors["model.embed_tokens.weight" if "embedding" in name else "lm_head.weight"]
        return F.pad(whole, (0, 0, 0, shape[0] * tp - VOCABULARY), value=0.5).chunk(tp)[rank]
    if name == "decoder.final_layernorm.weight":
        return tensors["model.norm.weight"]
    _, _, number, part, *rest = name.split(".")
    layer = model.decoder.layers[int(number)]
    prefix = f"model.layers.{layer.layer_number - 1}."
    if part == "self_attention":
        return _attention(rest, prefix + "self_attn.", tensors, case, rank)
    if part != "mlp":
        return tensors[prefix + {"input_layernorm": "input", "pre_mlp_layernorm": "post_attention"}[part] + _NORM]
    if rest[0] == "router":
        return tensors[f"{prefix}mlp.gate.weight"]
    prefix += "mlp."
    if rest[0] == "experts":
        tp, rank = case.etp, mpu.get_expert_tensor_parallel_rank()
        prefix += f"experts.{mpu.get_expert_model_parallel_rank() * layer.mlp.num_local_experts + int(rest[2])}."
    if "linear_fc2" in rest:
        return tensors[f"{prefix}down_proj.weight"].chunk(tp, 1)[rank]
    return torch.cat([tensors[f"{prefix}{half}_proj.weight"].chunk(tp)[rank] for half in ("gate", "up")])


_NORM = "_layernorm.weight"


def _attention(rest: list[str], prefix: str, tensors: dict[str, torch.Tensor], case: Case, rank: int) -> torch.Tensor:
    module, kind = rest
    if module == "linear_proj":
        return tensors[f"{prefix}o_proj.weight"].chunk(case.tp, 1)[rank]
    if module != "linear_qkv":
        return tensors[f"{prefix}{module[0]}_norm.weight"]
    of_groups = zip(*(tensors[f"{prefix}{part}_proj.{kind}"].chunk(case.groups) for part in "qkv"), strict=True)
    return torch.cat([torch.cat(group) for group in of_groups]).chunk(case.tp)[rank]


def logits(case: Case, model: GPTModel, tokens: torch.Tensor) -> torch.Tensor | None:
    """[batch, tokens, VOCABULARY] of all pipeline stages together; None on ranks that are not of the last one."""
    torch.cuda.current_device = lambda: "cpu"  # its rotary embedding and buffers go there, of their own accord
    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16.1 looks for it where there is no Transformer Engine
    length = tokens.shape[1]
    hidden = torch.empty(length, tokens.shape[0], _HIDDEN)
    later = torch.ones(length, length).triu(1).bool()[None, None]
    apart = dist.get_world_size() // case.pp  # ranks from one pipeline stage to the next
    with torch.no_grad():
        if not mpu.is_pipeline_first_stage():
            dist.recv(hidden, dist.get_rank() - apart)
            model.set_input_tensor(hidden)
        out = model(tokens, torch.arange(length)[None].expand_as(tokens), later)
        if not mpu.is_pipeline_last_stage():
            dist.send(out.contiguous(), dist.get_rank() + apart)
            return None
    parts = [torch.empty_like(out) for _ in range(case.tp)]
    dist.all_gather(parts, out.contiguous(), group=mpu.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)[..., :VOCABULARY]
