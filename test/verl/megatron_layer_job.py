"""Run by test_megatron_bridge.py: single layers of Qwen3.5 under Megatron-Bridge's own converters, over four ranks.

Its model cannot be built without a GPU. So parameters have the names, classes and shapes of Megatron-Core's modules.
The bridge's import fills them from checkpoint tensors, and the shards that its traced export finds are put together
again. Answers, as JSON, for every case what is wrong on any rank.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

from support import megatron_bridge_env

HIDDEN, HEADS, GROUPS, HEAD = 24, 8, 4, 6
KEY_HEADS, VALUE_HEADS, KEY, VALUE, KERNEL = 4, 8, 3, 5, 4
QK, V = KEY_HEADS * KEY, VALUE_HEADS * VALUE
CONFIG = {
    "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": HEAD,
    "attention_output_gate": True, "linear_key_head_dim": KEY, "linear_value_head_dim": VALUE,
    "linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": VALUE_HEADS, "linear_conv_kernel_dim": KERNEL,
}  # fmt: skip
CHECKPOINT = {
    "linear_attn.in_proj_qkv.weight": (2 * QK + V, HIDDEN),
    "linear_attn.in_proj_z.weight": (V, HIDDEN),
    "linear_attn.in_proj_b.weight": (VALUE_HEADS, HIDDEN),
    "linear_attn.in_proj_a.weight": (VALUE_HEADS, HIDDEN),
    "linear_attn.conv1d.weight": (2 * QK + V, 1, KERNEL),
    "linear_attn.norm.weight": (VALUE,),
    "linear_attn.out_proj.weight": (HIDDEN, V),
    "linear_attn.A_log": (VALUE_HEADS,),
    "linear_attn.dt_bias": (VALUE_HEADS,),
    "self_attn.q_proj.weight": (2 * HEADS * HEAD, HIDDEN),
    "self_attn.k_proj.weight": (GROUPS * HEAD, HIDDEN),
    "self_attn.v_proj.weight": (GROUPS * HEAD, HIDDEN),
}
RANKS = 4


def examine(trainer: Any, tp: int) -> list[str]:
    import torch

    from sglang_reshard.verl.megatron import Megatron
    from support.megatron_bridge import training_engine
    from support.megatron_models import Case, parallel
    from support.partial_states import not_assembled, of_this_rank

    generator = torch.Generator().manual_seed(3)
    expected = {f"model.layers.0.{n}": torch.randn(s, generator=generator) for n, s in CHECKPOINT.items()}
    with parallel(Case("qwen3", tp=tp)):
        tasks = list(map(task_of, parameters(tp)))
        for task in tasks:
            names = task.mapping.hf_param
            given = {k: expected[n] for k, n in names.items()} if isinstance(names, dict) else expected[names]
            # The import looks for the GPU that a parameter should be on.
            with torch.no_grad(), mock.patch.object(torch.cuda, "current_device", return_value=None):
                task.param_weight.copy_(task.mapping.hf_to_megatron(given, task.megatron_module))
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=5))
        bridge = SimpleNamespace(get_conversion_tasks=lambda module: tasks)
        given = Megatron(trainer.rank, trainer.size).tensors(training_engine([], config, bridge))
        state = of_this_rank(given)
        # Norms are stored less one, which rounds.
        for name, tensor, _ in given:
            if name.endswith("norm.weight"):
                assert torch.allclose(tensor, expected[name])
                expected[name] = tensor
        return not_assembled(state, expected)


def parameters(tp: int) -> list[tuple[str, str, tuple[int, ...], Any]]:
    """Returns name, class of the module, shape of this rank's shard and mapping of each parameter."""
    from megatron.bridge.models.conversion import param_mapping as of

    ours, theirs = "decoder.layers.0.self_attention.", "model.layers.0."
    linear, full = f"{theirs}linear_attn.", f"{theirs}self_attn."
    column, row = "TELayerNormColumnParallelLinear", "TERowParallelLinear"
    of.AutoMapping.register_module_type("GatedDeltaNet", "column")
    inner = 2 * QK + 2 * V + 2 * VALUE_HEADS
    separate = of.GDNLinearMappingSeparate(
        f"{ours}in_proj.weight", **{k: f"{linear}in_proj_{k}.weight" for k in ("qkv", "z", "b", "a")}
    )
    qkv = of.QKVMapping(f"{ours}linear_qkv.weight", **{k: f"{full}{k}_proj.weight" for k in "qkv"})
    conv = of.GDNConv1dMapping(f"{ours}conv1d.weight", f"{linear}conv1d.weight")
    norm = of.RMSNorm2ZeroCenteredRMSNormMapping(f"{ours}out_norm.weight", f"{linear}norm.weight")
    return [
        ("in_proj.weight", column, (inner // tp, HIDDEN), separate),
        ("linear_qkv.weight", column, ((2 * HEADS + 2 * GROUPS) * HEAD // tp, HIDDEN), qkv),
        ("conv1d.weight", "Conv1d", ((2 * QK + V) // tp, 1, KERNEL), conv),
        ("out_norm.weight", "RMSNorm", (VALUE,), norm),
        (
            "out_proj.weight",
            row,
            (HIDDEN, V // tp),
            of.AutoMapping(f"{ours}out_proj.weight", f"{linear}out_proj.weight"),
        ),
        ("A_log", "GatedDeltaNet", (VALUE_HEADS // tp,), of.AutoMapping(f"{ours}A_log", f"{linear}A_log")),
        ("dt_bias", "GatedDeltaNet", (VALUE_HEADS // tp,), of.AutoMapping(f"{ours}dt_bias", f"{linear}dt_bias")),
    ]


def task_of(parameter: tuple[str, str, tuple[int, ...], Any]) -> Any:
    import torch
    from torch import nn

    name, kind, shape, mapping = parameter
    module = type(kind, (nn.Module,), {})()
    module.config = SimpleNamespace(**CONFIG)
    module.register_parameter(name.rpartition(".")[2], nn.Parameter(torch.zeros(shape)))
    (weight,) = module.parameters()
    weight.tensor_model_parallel = kind != "RMSNorm"
    return SimpleNamespace(
        global_param_name=f"decoder.layers.0.self_attention.{name}", param_name=name, mapping=mapping,
        param_weight=weight, megatron_module=module,
    )  # fmt: skip


def main(release: str, sizes: list[int]) -> None:
    megatron_bridge_env.use(release)
    megatron_bridge_env.auto_bridge()
    from support.case_job import answer_cases

    answer_cases(RANKS, examine, sizes, deadline_s=300)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
