"""Run by test_megatron_lora.py: Megatron-Bridge's adapters of Megatron-Core models, and what it exports of them.

Answers, as JSON, for every case what each trainer rank finds wrong, and the number of tensors.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

from support import megatron_bridge_env

RANKS = 4
PREFIX = "base_model.model."  # PEFT's, of names in checkpoints


def main(cases: list[dict[str, Any]]) -> None:
    megatron_bridge_env.use("0.3.1")
    from support.case_job import answer_cases

    auto_bridge = megatron_bridge_env.auto_bridge()
    from megatron.bridge.peft import utils
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.dora import DoRA
    from megatron.bridge.peft.lora import LoRA

    utils.HAVE_TE = False  # else it asks whether layers are those of Transformer Engine
    kinds = {"LoRA": LoRA, "CanonicalLoRA": CanonicalLoRA, "DoRA": DoRA}
    answer_cases(RANKS, examine, cases, auto_bridge, kinds, deadline_s=600)


def examine(trainer: Any, case: dict[str, Any], auto_bridge: Any, kinds: dict[str, Any]) -> dict[str, Any]:
    import torch

    from sglang_reshard.errors import ReshardError
    from sglang_reshard.sources import megatron_adapter_config, megatron_adapter_tensors
    from support.megatron_models import Case, initial_models, on_cpu, parallel, reference
    from support.partial_states import not_assembled, of_this_rank

    peft = kinds[case.pop("peft")](**case.pop("options"))
    sizes = Case(**case)
    model = reference(sizes)
    with parallel(sizes), on_cpu(), tempfile.TemporaryDirectory() as folder, torch.no_grad():
        models = peft(initial_models(sizes), training=True)
        torch.manual_seed(trainer.rank)
        for chunk in models:
            for name, parameter in chunk.named_parameters():
                if ".adapter." in name:
                    torch.nn.init.normal_(parameter)
        share_replicas(models)
        try:
            given = megatron_adapter_tensors(models)
            config = json.loads(megatron_adapter_config(models))
        except ReshardError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        model.save_pretrained(folder)
        exported = auto_bridge.from_hf_pretrained(folder).export_adapter_weights(models, show_progress=False)
        expected = {PREFIX + name: tensor.clone() for name, tensor in exported}
    return {"wrong": not_assembled(of_this_rank(given), expected), "config": config, "tensors": len(expected)}


def share_replicas(models: list[Any]) -> None:
    """Data parallel ranks have the same weights: those of the first of them."""
    import torch.distributed as dist
    from megatron.core import mpu

    group = mpu.get_data_parallel_group()
    for chunk in models:
        for parameter in chunk.parameters():
            dist.broadcast(parameter, dist.get_process_group_ranks(group)[0], group=group)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
