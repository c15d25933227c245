"""Lists the tensors of a model's checkpoint: names, shapes and dtypes, without a model hub and without weights.

Reads the headers of safetensors, if the folder has some. Otherwise makes transformers' model of the config on the meta
device, and applies the conversions with which transformers saves a state (stacked experts are split, names restored).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sglang_reshard.cli.plan.models import CONFIG
from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.checkpoint_headers import folder_specs
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.sources.module import named_shards

_QUANTIZED = torch.float8_e4m3fn


def specs_of(folder: Path) -> list[TensorSpec]:
    """Returns all tensors of a model folder's checkpoint, sorted by name.

    Those of layers that the config does not count are left out: published checkpoints have one for speculative
    decoding, which a trainer does not send. Raises Unsupported when neither files nor config tell.
    """
    config = json.loads((folder / CONFIG).read_text())
    found = folder_specs(folder) if has_files(folder) else _of_config(config)
    layers = config.get("text_config", config).get("num_hidden_layers")
    return sorted((s for s in found if not _is_beyond(s.name, layers)), key=lambda spec: spec.name)


def has_files(folder: Path) -> bool:
    """Returns whether a model folder has the checkpoint itself, and not only its config."""
    return any(folder.glob("*.safetensors"))


def dtype_of(config: dict[str, Any]) -> str:
    """Returns the dtype that a config states for its weights, quantized ones aside."""
    text = config.get("text_config", {})
    named = next((d for c in (config, text) for k in ("dtype", "torch_dtype") if (d := c.get(k))), "bfloat16")
    return str(named).removeprefix("torch.")


def _is_beyond(name: str, layers: int | None) -> bool:
    found = re.search(r"\blayers\.(\d+)\.", name)
    return layers is not None and found is not None and int(found[1]) >= layers


def _of_config(config: dict[str, Any]) -> Iterator[TensorSpec]:
    model = _transformers_model({key: value for key, value in config.items() if key != "quantization_config"})
    block = _block(config.get("quantization_config"))
    if block is not None:
        _mark_quantized(model, config["quantization_config"])
    for name, tensor in _as_saved(model).items():
        shape = tuple(tensor.shape)
        yield TensorSpec(name, shape, str(tensor.dtype).removeprefix("torch."))
        if block is not None and tensor.dtype == _QUANTIZED:
            rows, columns = shape
            yield TensorSpec(f"{name}_scale_inv", (-(-rows // block[0]), -(-columns // block[1])), "float32")


def _transformers_model(config: dict[str, Any]) -> torch.nn.Module:
    import transformers
    from transformers import initialization
    from transformers.integrations import hub_kernels

    # Some layers would fetch kernels from the Hub; nothing is computed with here.
    vars(hub_kernels)["_kernels_available"] = False
    architecture = config["architectures"][0]
    writer = getattr(transformers, architecture, None)
    if writer is None:
        raise Unsupported(
            f"transformers {transformers.__version__} has no {architecture}, so a config alone does not tell the "
            "checkpoint's tensors; give a folder with its safetensors"
        )
    try:
        settings = writer.config_class(**config)
        with torch.device("meta"), initialization.no_init_weights():
            model = writer._from_config(settings, dtype=getattr(torch, dtype_of(config)))
    except Exception as error:
        raise Mismatch(
            f"transformers makes no {architecture} of the config: {type(error).__name__}: {error}"
        ) from error
    model.tie_weights()
    return model


def _block(quantization: dict[str, Any] | None) -> tuple[int, int] | None:
    """Elements that share a scale, [rows, columns]; None where nothing is quantized."""
    if quantization is None:
        return None
    block = quantization.get("weight_block_size")
    if quantization.get("quant_method") != "fp8" or not block:
        raise Unsupported(
            f"of a checkpoint with quant_method={quantization.get('quant_method')!r} a config alone does not tell the "
            "tensors (block-fp8 is the only one); give a folder with its safetensors"
        )
    return int(block[0]), int(block[1])


def _mark_quantized(model: Any, quantization: dict[str, Any]) -> None:
    """Give what is quantized in published block-fp8 checkpoints its dtype, which survives all renaming.

    That is linear layers, without the head, and experts, which are parameters of three dimensions here.
    """
    left_alone = tuple(quantization.get("modules_to_not_convert") or ())
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if module is head or any(path == name or path.startswith(f"{name}.") for name in left_alone):
            continue
        for name, parameter in list(module._parameters.items()):
            linear = isinstance(module, torch.nn.Linear) and name == "weight"
            experts = parameter is not None and parameter.dim() == 3 and "experts" in path
            if linear or experts:
                quantized = parameter.detach().to(_QUANTIZED)
                module._parameters[name] = torch.nn.Parameter(quantized, requires_grad=False)


def _as_saved(model: Any) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: tensor.detach() for name, tensor in named_shards(model)}
    saved: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return {
        name: tensor.float() if any(part in name.split(".") for part in kept) else tensor
        for name, tensor in saved.items()
    }
