"""Reads verl's Megatron engine: Megatron-Core's parameters, live or offloaded, under their names in the checkpoint.

Megatron-Bridge has a converter to the checkpoint for each parameter, which gathers first. verl makes a probe of it that
runs the same code without communication: other ranks' elements are placeholders. `TracedParameters` traces it once, on
tensors without data.

verl's own index of probes (`_mcore_export_index`) is not used: to build it, every probe is run on real tensors of the
checkpoint's size, and placeholders as large as the shards are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources import Conversion, ExplicitSharding, TracedParameters
from sglang_reshard.sources.traced_parameters import Values
from sglang_reshard.verl.megatron_experts import CheckpointShapes, Finish, checkpoint_names, finish_of, stacked_experts

# Megatron pads these to a multiple of the tensor parallel size; checkpoints are not padded.
_PADDED_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class Megatron:
    """Reads one trainer rank's parameters. Traces their converters at the first sync."""

    def __init__(self, trainer_rank: int, trainer_ranks: int) -> None:
        self._trainer_rank, self._trainer_ranks = trainer_rank, trainer_ranks
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
        return self._traced(engine).tensors(values_of(engine.module))

    def _freed(self, engine: Any) -> torch.Tensor | None:
        """Returns a parameter whose values are nowhere; None if there is none."""
        values = values_of(engine.module)
        of_rank = self._traced(engine).parameters
        return next((p for p in of_rank if p.numel() and not values(p).untyped_storage().nbytes()), None)

    def _traced(self, engine: Any) -> TracedParameters:
        if self._parameters is None:
            _check(engine)
            values = values_of(engine.module)
            self._parameters = TracedParameters(
                _conversions(engine), trainer_rank=self._trainer_rank, trainer_ranks=self._trainer_ranks, values=values
            )
        return self._parameters


def values_of(chunks: Iterable[Any]) -> Values:
    """Returns a function that finds a parameter's values while verl has offloaded them (`megatron.param_offload`).

    Parameters are views of a flat buffer. verl offloads it by freeing the buffer's storage, which leaves the parameters
    on the GPU without memory, and keeps the values as its attribute `cpu_data`, in pinned memory.

    chunks  the model's, wrapped by Megatron's DDP or not
    """
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the id of the buffer's storage
    for chunk in chunks:
        for name in ("buffers", "expert_parallel_buffers"):
            buffers = getattr(chunk, name, None)
            for buffer in buffers if isinstance(buffers, list) else ():
                if (copy := getattr(buffer.param_data, "cpu_data", None)) is not None:
                    copies[_storage_id(buffer.param_data)] = buffer.param_data, copy

    def values(parameter: torch.Tensor) -> torch.Tensor:
        """Returns a parameter's data, or the same view of the host copy if its memory was freed.

        Returns the data without memory if no copy is known to have the same elements at the same places.
        """
        data = parameter.data
        flat, copy = copies.get(_storage_id(data), (None, None))
        if data.numel() == 0 or data.untyped_storage().nbytes() or flat is None or copy is None:
            return data
        start = int(data.storage_offset()) - int(flat.storage_offset())
        last = start + sum((n - 1) * stride for n, stride in zip(data.shape, data.stride(), strict=True))
        alike = copy.shape == flat.shape and copy.dtype == flat.dtype == data.dtype
        if not (alike and flat.is_contiguous() and copy.is_contiguous() and 0 <= start <= last < flat.numel()):
            return data
        return copy.as_strided(data.size(), data.stride(), int(copy.storage_offset()) + start)

    return values


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # an emptied storage has no address


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
    _check_untied(own, tasks)
    shapes = CheckpointShapes(engine.bridge)
    stacked, finish = stacked_experts(engine.bridge, shapes, own), finish_of(engine.bridge, shapes)
    for task in own:
        if stack := stacked.get(id(task)):
            yield Conversion(task.global_param_name, task.param_weight, stack.converter(task), part=True)
        else:
            # Megatron-Core marks what it keeps equal over pipeline stages, by adding up the gradients.
            tied = _is_tied(task)
            whole = not getattr(task.param_weight, "tensor_model_parallel", False)
            convert = _converter(task, finish, vocabulary)
            yield Conversion(task.global_param_name, task.param_weight, convert, tied, whole=whole)


def _is_tied(task: Any) -> bool:
    return bool(getattr(task.param_weight, "shared_embedding", False))


def _check_untied(own: Sequence[Any], tasks: Iterable[Any]) -> None:
    """Raises Unsupported if a parameter on any rank has the checkpoint tensor of another one, unless they are tied.

    Trainer ranks that hold the same part of a tensor count as replicas, even if they hold it in different parameters.
    """
    alone = [task for task in own if not (_is_tied(task) or getattr(task.mapping, "is_expert", False))]
    names = {name: task.global_param_name for task in alone for name in checkpoint_names(task.mapping)}
    for task in tasks:
        for name in checkpoint_names(task.mapping) if task is not None and task.mapping is not None else ():
            if (first := names.get(name, task.global_param_name)) != task.global_param_name:
                raise Unsupported(
                    f"{first} and {task.global_param_name}, which are not tied, are both converted to {name}. Only "
                    "tensors whose parts are shards of one parameter are supported"
                )


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
