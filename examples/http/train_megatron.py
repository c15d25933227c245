#!/usr/bin/env python3
"""A Megatron-Core trainer without verl, and engines that another system has started, as slime has them.

    export SGLANG_RESHARD_API_KEY=...
    .venv/bin/torchrun --nproc-per-node 2 examples/http/train_megatron.py MODEL \
        --rollout-external-engine-addrs HOST:PORT ...

slime converts Megatron's parameters to checkpoint tensors, which gathers them, and broadcasts these or writes them to a
folder. Here the parameters are read in place: `megatron_tensors.py` says which boxes of which tensors they hold.

MODEL is a folder with a transformers configuration, of the Llama or Qwen families. All ranks are tensor parallel.
"""

from __future__ import annotations

import argparse
import contextlib
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from engines import connect, say
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_tensors import MegatronTensors
from transformers import AutoConfig, PretrainedConfig

STEPS, OPTIMIZER_STEPS = 2, 8
SEQUENCE = [5, 8, 13, 21, 34, 55, 89, 144]


def main(path: str, addresses: list[str]) -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    given = AutoConfig.from_pretrained(path)
    with contextlib.nullcontext() if on_gpu else _current_device_is_the_cpu():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks, create_gloo_process_groups=False)
        if on_gpu:
            torch.cuda.set_device(rank % torch.cuda.device_count())
            model_parallel_cuda_manual_seed(0)
        else:
            initialize_rng_tracker(inference_rng_tracker=True)  # one that needs no GPU; there is no dropout
        torch.manual_seed(0)
        model = _model(given, ranks).to("cuda" if on_gpu else "cpu")
        listing = MegatronTensors(
            hidden=given.hidden_size,
            heads=given.num_attention_heads,
            groups=given.num_key_value_heads,
            head=given.head_dim,
            mlp=given.intermediate_size,
            vocabulary=given.vocab_size,
            ranks=tuple(range(ranks)),
        )
        # Made once: the same sharding objects in every update mean that nothing has changed.
        tensors = [listed for name, parameter in model.named_parameters() for listed in listing.of(name, parameter)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        sender, engines, _session = connect([f"http://{address}" for address in addresses])
        for step in range(1, STEPS + 1):
            for _ in range(OPTIMIZER_STEPS):
                _loss(model).backward()
                _sum_gradients_of_head_norms(model)
                optimizer.step()
                optimizer.zero_grad()
            sender.update(tensors, weight_version=f"megatron {step}", verify="full")
            say(engines, f"megatron {step}", SEQUENCE[:2], len(SEQUENCE) - 2)
        sender.close()
    dist.destroy_process_group()


def _model(given: PretrainedConfig, ranks: int) -> GPTModel:
    """A dense model; its own initial weights, which the engine has from nobody."""
    config = TransformerConfig(
        num_layers=given.num_hidden_layers,
        hidden_size=given.hidden_size,
        num_attention_heads=given.num_attention_heads,
        num_query_groups=given.num_key_value_heads,
        kv_channels=given.head_dim,
        ffn_hidden_size=given.intermediate_size,
        activation_func=F.silu,
        gated_linear_unit=True,
        normalization="RMSNorm",
        layernorm_epsilon=given.rms_norm_eps,
        qk_layernorm=given.model_type.startswith("qwen3"),
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        # Its fused kernels are for GPUs.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    return GPTModel(
        config,
        spec,
        vocab_size=-(-given.vocab_size // ranks) * ranks,
        max_sequence_length=given.max_position_embeddings,
        share_embeddings_and_output_weights=given.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=int(given.rope_parameters["rope_theta"]),
    )


def _loss(model: GPTModel) -> torch.Tensor:
    device = next(model.parameters()).device
    tokens = torch.tensor([SEQUENCE], device=device)
    places = torch.arange(tokens.shape[1], device=device)[None]
    later = torch.ones(tokens.shape[1], tokens.shape[1], device=device).triu(1).bool()[None, None]
    losses: torch.Tensor = model(tokens[:, :-1], places[:, :-1], later[..., :-1, :-1], labels=tokens[:, 1:])
    return losses.mean()


def _sum_gradients_of_head_norms(model: GPTModel) -> None:
    """As Megatron's `finalize_model_grads` does: each rank has these gradients of its own heads only.

    Without it the ranks' copies of these norms would differ, and `verify` would refuse the update.
    """
    for name, parameter in model.named_parameters():
        if "self_attention" in name and "layernorm" in name:
            dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())


@contextlib.contextmanager
def _current_device_is_the_cpu():
    """Megatron-Core asks for the current GPU of its own accord; on a host without one it gets the CPU."""
    with (
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
    ):
        yield


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rollout-external-engine-addrs", nargs="+", required=True, metavar="HOST:PORT")
    given = parser.parse_args()
    main(given.model, given.rollout_external_engine_addrs)
