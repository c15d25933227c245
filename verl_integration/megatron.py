"""verl's Megatron engine: the live parameters of Megatron-Core, under the names of the checkpoint.

Megatron-Bridge has a converter to the checkpoint for each parameter, which gathers first. verl makes a probe of it
that runs the same code without communication: other ranks' elements are placeholders. That is run once, without
bytes, by `HeldParameters`.

verl's own index of probes (`_mcore_export_index`) is not used: to make it, every probe is run on real tensors of the
checkpoint's size, and placeholders as large as the shards are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources import ExplicitSharding
from sglang_reshard.verl.exchange import Exchange
from sglang_reshard.verl.held_parameters import Conversion, HeldParameters

# Megatron pads these to a multiple of the tensor parallel size; checkpoints end where the vocabulary does.
_OVER_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class Megatron:
    """One trainer rank's reading of a Megatron engine. Its parameters are probed at the first sync."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._parameters: HeldParameters | None = None

    def tensors(self, engine: Any) -> list[tuple[str, torch.Tensor, ExplicitSharding]]:
        """What `describe` takes. Raises Unsupported and Mismatch as `HeldParameters` does, the first time."""
        if self._parameters is None:
            _check(engine)
            self._parameters = HeldParameters(_conversions(engine), self._exchange)
        return self._parameters.tensors()


def _check(engine: Any) -> None:
    if engine.vanilla_bridge:
        raise Unsupported("the old mbridge has no converters to probe; set megatron.vanilla_mbridge=False")
    if engine.peft_cls is not None:
        raise Unsupported("LoRA adapters on Megatron's parameters are not carried")


def _conversions(engine: Any) -> Iterator[Conversion]:
    """Every parameter of all pipeline stages; Megatron-Bridge lists them alike on all ranks."""
    vocabulary = engine.model_config.hf_config.get_text_config().vocab_size
    finish = _finish(engine.bridge)
    for task in engine.bridge.get_conversion_tasks(engine.module):
        if task is None or task.param_weight is None:  # of no use to the checkpoint, or of another pipeline stage
            yield Conversion("", None, _nothing)
        else:
            yield Conversion(task.global_param_name, task.param_weight, _converter(task, finish, vocabulary))


def _nothing(shard: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {}


def _finish(bridge: Any) -> Callable[[Any, Any], Mapping[str, torch.Tensor]]:
    """What the architecture's bridge does to the tensors that one task was converted to."""
    hook = getattr(getattr(bridge, "_model_bridge", None), "maybe_modify_converted_hf_weight", None)
    if hook is None:
        return lambda task, tensors: tensors
    checkpoint = getattr(bridge.hf_pretrained, "state", {})
    return lambda task, tensors: hook(task, tensors, checkpoint)


def _converter(
    task: Any, finish: Callable[[Any, Any], Mapping[str, torch.Tensor]], vocabulary: int
) -> Callable[[torch.Tensor], Mapping[str, torch.Tensor]]:
    def convert(shard: torch.Tensor) -> Mapping[str, torch.Tensor]:
        from verl.workers.engine.megatron.delta_export import make_probe

        if getattr(task.mapping, "is_grouped_export", False):
            raise Unsupported("it is one of the experts that the checkpoint has stacked in one tensor")
        probe = make_probe(task.mapping, task.megatron_module)
        tensors = finish(task, probe.megatron_to_hf(shard, task.megatron_module))
        if task.global_param_name.endswith(_OVER_VOCABULARY):
            return {name: tensor[:vocabulary] for name, tensor in tensors.items()}
        return tensors

    return convert
