"""Tiny Megatron-Core models on CPU that hold the weights of a transformers model.

The way here, from checkpoint tensors to shards, is written from Megatron-Core's layout and shares nothing with the
converters of `megatron_bridge`, which go the other way. That both models give the same logits shows it to be right.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from megatron.core import mpu, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

STACKED = "qwen3_vl_moe"  # whose text model is Qwen3-MoE's, in a checkpoint that stacks experts


@dataclass(frozen=True)
class Case:
    """A model (`kind` as transformers calls it) and how it is spread over the trainer ranks.

    tp, pp, ep, etp  sizes: tensor, pipeline, expert and expert tensor parallel
    vp               model chunks of a pipeline stage
    flat             all parameters of a chunk are in one buffer, the last one first, as Megatron's optimizer has them
    groups           heads with a key and value of their own
    head, mlp        widths in elements, of a head and of a dense layer or an expert
    """

    kind: str
    tp: int = 1
    pp: int = 1
    vp: int = 1
    ep: int = 1
    etp: int = 1
    flat: bool = False
    groups: int = 2
    tied: bool = False
    layers: int = 2
    hidden: int = 24
    heads: int = 4
    head: int = 8
    mlp: int = 20
    vocabulary: int = 61
    positions: int = 64

    @property
    def experts(self) -> int | None:
        return 4 if self.kind in ("qwen3_moe", STACKED) else None


def reference(case: Case, seed: int = 7) -> transformers.PreTrainedModel:
    """The transformers model, the same on every rank."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": case.vocabulary,
        "hidden_size": case.hidden,
        "intermediate_size": case.mlp,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.groups,
        "head_dim": case.head,
        "max_position_embeddings": case.positions,
        "tie_word_embeddings": case.tied,
    }
    if case.kind == "qwen2":
        config = transformers.Qwen2Config(**sizes)
        model = transformers.Qwen2ForCausalLM(config)
    elif case.kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    elif case.kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    else:
        experts = {"num_experts": case.experts, "num_experts_per_tok": 2, "moe_intermediate_size": case.mlp}
        config = transformers.Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True)
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def published(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the checkpoint as transformers writes it: of the wrapped text model, with experts in one tensor.

    transformers 4 keeps them transposed, as the published checkpoints are.
    """
    if case.kind != STACKED:
        return tensors
    found, stacked = {}, defaultdict(dict[int, dict[str, torch.Tensor]])
    for name, tensor in tensors.items():
        layer, is_expert, rest = name.replace("model.", "model.language_model.", 1).partition(".experts.")
        if is_expert:
            expert, part, _ = rest.split(".")
            stacked[layer].setdefault(int(expert), {})[part] = tensor
        else:
            found[layer] = tensor
    turned = transformers.__version__.startswith("4.")
    for layer, experts in stacked.items():
        in_order = [experts[number] for number in range(len(experts))]
        both = torch.stack([torch.cat([of["gate_proj"], of["up_proj"]]) for of in in_order])
        down = torch.stack([of["down_proj"] for of in in_order])
        found[f"{layer}.experts.gate_up_proj"] = both.mT if turned else both
        found[f"{layer}.experts.down_proj"] = down.mT if turned else down
    return found


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


def export(folder: Path, case: Case, version: str) -> dict[str, torch.Tensor]:
    """The checkpoint of a version. transformers itself writes it, for what it is compared with to load."""
    model = reference(case, seed=int(version))
    if dist.get_rank() == 0:
        model.save_pretrained(folder / version)
    return checkpoint(model)


@contextlib.contextmanager
def parallel(case: Case) -> Iterator[None]:
    """Megatron-Core's process groups of a case, over all ranks."""
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp if case.vp > 1 else None,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        create_gloo_process_groups=False,  # beside those of NCCL: here all are
    )
    groups = [group for group in parallel_state._global_process_group_list if group is not None]
    try:
        yield
        dist.barrier()  # until no rank uses them
    finally:
        mpu.destroy_model_parallel()
        # Each has threads and connections, which would stay as long as the process.
        for group in groups:
            dist.destroy_process_group(group)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Where Megatron-Core takes the current GPU of its own accord, it gets the CPU."""
    with (
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
        # 0.16.1 looks for it where there is no Transformer Engine.
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
    ):
        yield


def megatron_models(case: Case, tensors: dict[str, torch.Tensor]) -> list[GPTModel]:
    """This rank's part of a Megatron-Core model with the weights of a checkpoint, by model chunks."""
    models = initial_models(case)
    load(case, models, tensors)
    for model in models if case.flat else ():
        _flatten(model)
    return models


def _flatten(model: GPTModel) -> None:
    parameters = list(model.parameters())[::-1]
    buffer, begin = torch.empty(sum(p.numel() for p in parameters)), 0
    for parameter in parameters:
        end = begin + parameter.numel()
        parameter.data = buffer[begin:end].view(parameter.shape).copy_(parameter.data)
        begin = end


def initial_models(case: Case) -> list[GPTModel]:
    """This rank's part of a Megatron-Core model as its constructor leaves it, by model chunks."""
    initialize_rng_tracker(inference_rng_tracker=True)
    config = _config(case)
    with on_cpu():
        return [_model(case, config, stage if case.vp > 1 else None) for stage in range(case.vp)]


def _config(case: Case) -> TransformerConfig:
    return TransformerConfig(
        num_layers=case.layers,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        num_query_groups=case.groups,
        kv_channels=case.head,
        ffn_hidden_size=case.mlp,
        activation_func=F.silu,
        gated_linear_unit=True,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        qk_layernorm=case.kind.startswith("qwen3"),
        add_bias_linear=False,
        add_qkv_bias=case.kind == "qwen2",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp if case.vp > 1 else None,
        pipeline_dtype=torch.float32,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        num_moe_experts=case.experts,
        moe_ffn_hidden_size=case.mlp if case.experts else None,
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


def _model(case: Case, config: TransformerConfig, vp_stage: int | None) -> GPTModel:
    spec = get_gpt_layer_local_spec(num_experts=case.experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        vocab_size=-(-case.vocabulary // (2 * case.tp)) * 2 * case.tp,
        max_sequence_length=case.positions,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="rope",
        rotary_base=10_000,
        vp_stage=vp_stage,
    )
    return model.eval()


def load(case: Case, models: Sequence[GPTModel], tensors: dict[str, torch.Tensor]) -> None:
    """Writes the weights of a checkpoint into this rank's parameters, in place as an optimizer does."""
    with torch.no_grad():
        for model in models:
            for name, parameter in model.named_parameters():
                parameter.copy_(_shard(model, name, tensors, case, parameter.shape))


def _shard(model: GPTModel, name: str, tensors: dict[str, torch.Tensor], case: Case, shape: torch.Size) -> torch.Tensor:
    """What a Megatron parameter holds on this rank."""
    tp, rank = case.tp, mpu.get_tensor_model_parallel_rank()
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        embedding = case.tied or "embedding" in name
        whole = tensors["model.embed_tokens.weight" if embedding else "lm_head.weight"]
        return F.pad(whole, (0, 0, 0, shape[0] * tp - case.vocabulary), value=0.5).chunk(tp)[rank]
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


def logits(case: Case, models: Sequence[GPTModel], tokens: torch.Tensor) -> torch.Tensor | None:
    """[batch, tokens, vocabulary] of all pipeline stages together; None on ranks that are not of the last one."""
    length = tokens.shape[1]
    later = torch.ones(length, length).triu(1).bool()[None, None]
    stage, rank = mpu.get_pipeline_model_parallel_rank(), dist.get_rank()
    apart = dist.get_world_size() // case.pp  # ranks from one pipeline stage to the next
    first = rank - stage * apart
    with torch.no_grad(), on_cpu():
        for number, model in enumerate(models):
            place = number * case.pp + stage  # of the chunk in the whole model
            if place:
                hidden = torch.empty(length, tokens.shape[0], case.hidden)
                dist.recv(hidden, first + (place - 1) % case.pp * apart)
                model.set_input_tensor(hidden)
            out = model(tokens, torch.arange(length)[None].expand_as(tokens), later)
            if place + 1 < case.pp * case.vp:
                dist.send(out.contiguous(), first + (place + 1) % case.pp * apart)
    if stage + 1 < case.pp:
        return None
    parts = [torch.empty_like(out) for _ in range(case.tp)]
    dist.all_gather(parts, out.contiguous(), group=mpu.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)[..., : case.vocabulary]
