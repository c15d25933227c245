"""Reads models whose tensors are not those of a checkpoint: experts stacked in one tensor, gate and up fused in one.

    tensors = checkpoint_tensors(model)                 # transformers 5
    tensors = checkpoint_tensors(model, adapter.to_hf)  # torchtitan's StateDictAdapter
    sender.update(tensors)                              # in every step

The library that stacks has a conversion for its own checkpoints. It runs once here, over tensors without data, and so
tells where in a parameter each checkpoint tensor is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.names import pairs
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.sources.fused import FusedSlice, FusedTensor, slice_of_boxes
from sglang_reshard.sources.memory_identity import is_flattened, is_partitioned
from sglang_reshard.sources.module import named_shards
from sglang_reshard.trace.converter_trace import trace_conversion

ToCheckpoint: TypeAlias = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
# Attributes of transformers' models, and what they tell.
_NOT_SLICED = {
    "hf_quantizer": "is quantized",
    "_tp_size": "is sharded by transformers' own tensor parallelism",
    "_hf_peft_config_loaded": "has adapters",
}
_CURE = "leave it out in `to_checkpoint`, convert it yourself before each update, and pass it as (name, tensor), too"


def checkpoint_tensors(
    model: nn.Module | Mapping[str, torch.Tensor], to_checkpoint: ToCheckpoint | None = None
) -> list[tuple[Any, ...]]:
    """Returns the tensors of a model's checkpoint as slices of its parameters, as `update` takes them.

    Nothing is gathered or copied. Pass the same list in every update, and make another one after the model's
    parameters were replaced. Every trainer rank calls this, and it does not communicate.

    model          a module, or a state dict of DTensors and of tensors that every rank holds in full
    to_checkpoint  returns the state dict of a checkpoint for that of the model, as torchtitan's
                   `StateDictAdapter.to_hf` does. The tensors that it is called with have global shapes and no data.
                   By default, the conversion of `save_pretrained` of a transformers 5 model

    Each entry is (checkpoint name, tensor) for a tensor that the conversion renames or leaves alone, and otherwise
    (parameter's name, tensor, `FusedTensor`).

    Raises Unsupported, naming the tensor, if a checkpoint tensor is not a slice of one parameter with its dimensions
    permuted: the conversion computes, casts, joins parameters or reorders rows. Raises it, too, for tensors of FSDP1
    and ZeRO-3, and without `to_checkpoint` for models that are not transformers 5's.
    """
    convert = to_checkpoint or _of_transformers(model)
    rows = list(named_shards(model) if isinstance(model, nn.Module) else pairs(model))
    for name, tensor, *sharding in rows:
        if sharding or is_partitioned(tensor) or is_flattened(tensor):
            raise Unsupported(
                f"{name} lies in a flat buffer of FSDP1 or ZeRO-3, whose slices cannot be sent; shard the model with "
                "FSDP2, or pass the checkpoint tensors as members of a FlatBuffer"
            )
    given = {name: tensor for name, tensor, *_ in rows}
    specs = [TensorSpec.of(name, tensor) for name, tensor in given.items()]
    try:
        traced = trace_conversion(convert, specs)
    except Unsupported as error:
        raise Unsupported(f"the conversion does not only slice: {error}. To send it, {_CURE}") from error
    except Exception as error:
        raise Unsupported(
            f"the conversion to checkpoint tensors does not run on tensors without data ({type(error).__name__}: "
            f"{error}); pass another one as `to_checkpoint`"
        ) from error
    whole: list[tuple[Any, ...]] = []
    slices: dict[str, list[tuple[str, FusedSlice]]] = {}
    for name, (shape, boxes) in traced.items():
        parameter = _only_one(name, [*boxes])
        fused = tuple(given[parameter].shape)
        part = slice_of_boxes(shape, boxes[parameter], fused)
        if part is None:
            raise Unsupported(
                f"the conversion makes {name} of shape {shape}, which is not a slice of {parameter} of shape {fused} "
                f"with its dimensions permuted: it reorders, repeats or pads. To send it, {_CURE}"
            )
        if part == FusedSlice((0,) * len(fused), fused, tuple(range(len(fused)))):
            whole.append((name, given[parameter]))
        else:
            slices.setdefault(parameter, []).append((name, part))
    return [*whole, *((name, given[name], FusedTensor(tuple(parts))) for name, parts in slices.items())]


def _only_one(name: str, parameters: list[str]) -> str:
    """Returns the one parameter that a checkpoint tensor is of. Raises Unsupported for none and for several."""
    if len(parameters) == 1:
        return parameters[0]
    of = f"joins {', '.join(sorted(parameters))} in {name}" if parameters else f"makes {name} of no tensor of the model"
    raise Unsupported(f"the conversion {of}; only slices of one tensor are supported. To send it, {_CURE}")


def _of_transformers(model: object) -> ToCheckpoint:
    """Returns the conversion of a transformers model's `save_pretrained`."""
    loading = sys.modules.get("transformers.core_model_loading")  # of transformers 5, which its models import
    revert = getattr(loading, "revert_weight_conversion", None)
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        raise Unsupported(
            f"{type(model).__name__} is not a model of transformers; pass the model inside its wrapper, or the "
            "conversion of its state dict to that of a checkpoint as `to_checkpoint`, such as torchtitan's "
            "`StateDictAdapter.to_hf`"
        )
    if revert is None:
        raise Unsupported(
            f"{type(model).__name__}: this version of transformers has no conversion of checkpoints. Its models have "
            "the tensors of their checkpoints: pass the model itself, or the conversion as `to_checkpoint`"
        )
    for attribute, kind in _NOT_SLICED.items():
        if getattr(model, attribute, None):
            raise Unsupported(
                f"{type(model).__name__} {kind}, so `save_pretrained` does more than slice its parameters; pass a "
                "state dict of DTensors, or of whole tensors, and its conversion as `to_checkpoint`"
            )
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())

    def to_checkpoint(state: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        saved: Mapping[str, torch.Tensor] = revert(
            model, {name: tensor for name, tensor in state.items() if name not in ignored}
        )
        return saved

    return to_checkpoint
