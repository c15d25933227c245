"""Reads verl's Megatron engine: Megatron-Core's parameters, live or offloaded, under their names in the checkpoint.

Megatron-Bridge has a converter to the checkpoint for each parameter, which gathers first. verl makes a probe of it that
runs the same code without communication: other ranks' elements are placeholders. `TracedParameters` traces it once, on
tensors without data.

verl's own index of probes (`_mcore_export_index`) is not used: to build it, every probe is run on real tensors of the
checkpoint's size, and placeholders as large as the shards are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources import ExplicitSharding
from sglang_reshard.verl.megatron_experts import CheckpointShapes, Finish, finish_of, stacked_experts
from sglang_reshard.verl.offloaded import OffloadedParameters
from sglang_reshard.verl.traced_parameters import Conversion, TracedParameters

# Megatron pads these to a multiple of the tensor parallel size; checkpoints are not padded.
_PADDED_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class Megatron:
    """Reads one trainer rank's parameters. Traces their converters at the first sync."""

    def __init__(self, trainer_ranks: int) -> None:
        self._trainer_ranks = trainer_ranks
        self._parameters: TracedParameters | None = None

    def has_values(self, engine: Any) -> bool:
        """Returns whether `tensors` finds all parameters' values, on a GPU or offloaded."""
        return self._freed(engine) is None

    def tensors(self, engine: Any) -> list[tuple[str, torch.Tensor, ExplicitSharding]]:
        """Returns the arguments of `describe`, with partial=True. Raises as `TracedParameters` does, the first time."""
        if (freed := self._freed(engine)) is not None:
            raise Unsupported(
                f"{_name(engine, freed)} has no memory on this trainer rank, and verl has no host copy of it: "
                "something other than verl's param_offload has freed it. Load the parameters before the sync"
            )
        return self._traced(engine).tensors(OffloadedParameters(engine.module).values)

    def _freed(self, engine: Any) -> torch.Tensor | None:
        """Returns a parameter whose values are nowhere; None if there is none."""
        values = OffloadedParameters(engine.module).values
        of_rank = self._traced(engine).parameters
        return next((p for p in of_rank if p.numel() and not values(p).untyped_storage().nbytes()), None)

    def _traced(self, engine: Any) -> TracedParameters:
        if self._parameters is None:
            _check(engine)
            values = OffloadedParameters(engine.module).values
            self._parameters = TracedParameters(_conversions(engine), self._trainer_ranks, values)
        return self._parameters


def _name(engine: Any, parameter: torch.Tensor) -> str:
    named = (pair for chunk in engine.module for pair in chunk.named_parameters())
    return next((name for name, of in named if of is parameter), "a parameter")


def _check(engine: Any) -> None:
    if engine.vanilla_bridge:
        raise Unsupported("the old mbridge has no converters that can be traced; set megatron.vanilla_mbridge=False")
    if engine.peft_cls is not None:
        raise Unsupported("LoRA adapters on Megatron's parameters are not supported; merge them before the sync")


def _conversions(engine: Any) -> Iterator[Conversion]:
    """Yields every parameter of this rank that is in the checkpoint."""
    vocabulary = engine.model_config.hf_config.get_text_config().vocab_size
    tasks = engine.bridge.get_conversion_tasks(engine.module)  # None, or without a weight: of another pipeline stage
    own = [task for task in tasks if task is not None and task.param_weight is not None]
    shapes = CheckpointShapes(engine.bridge)
    stacked, finish = stacked_experts(engine.bridge, shapes, own), finish_of(engine.bridge, shapes)
    for task in own:
        if stack := stacked.get(id(task)):
            yield Conversion(task.global_param_name, task.param_weight, stack.converter(task), part=True)
        else:
            # Megatron-Core marks what it keeps equal over pipeline stages, by adding up the gradients.
            tied = getattr(task.param_weight, "shared_embedding", False)
            whole = not getattr(task.param_weight, "tensor_model_parallel", False)
            convert = _converter(task, finish, vocabulary)
            yield Conversion(task.global_param_name, task.param_weight, convert, tied, whole=whole)


def _converter(task: Any, finish: Finish, vocabulary: int) -> Callable[[torch.Tensor], Mapping[str, torch.Tensor]]:
    def convert(shard: torch.Tensor) -> Mapping[str, torch.Tensor]:
        from verl.workers.engine.megatron.delta_export import make_probe

        converted = make_probe(task.mapping, task.megatron_module).megatron_to_hf(shard, task.megatron_module)
        tensors = finish(task, converted)
        if converted and not tensors:  # kept for later
            raise Unsupported(
                "the bridge fuses it with other parameters into one checkpoint tensor, which is supported for experts "
                "only"
            )
        if task.global_param_name.endswith(_PADDED_VOCABULARY):
            return {name: tensor[:vocabulary] for name, tensor in tensors.items()}
        return tensors

    return convert
