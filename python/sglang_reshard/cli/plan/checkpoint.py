"""Finds a model's config.json, and lists the tensors of its checkpoint: without a model hub and without weights.

The list is of names, shapes and dtypes. It is read from the headers of safetensors, if the folder has some. Otherwise
it is that of transformers' model of the config on the meta device, with the conversions with which transformers saves a
state (stacked experts are split, names restored).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.checkpoint_headers import folder_specs
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.nearest import nearest
from sglang_reshard.sources.module import named_shards

_QUANTIZED = torch.float8_e4m3fn
CONFIG = "config.json"


def specs_of(folder: Path) -> list[TensorSpec]:
    """Returns all tensors of a model folder's checkpoint, sorted by name.

    Those of layers that the config does not count are left out: published checkpoints have one for speculative
    decoding, which a trainer does not send. Raises Unsupported when neither files nor config tell.
    """
    config = json.loads((folder / CONFIG).read_text())
    found = folder_specs(folder) if has_files(folder) else _of_config(config)
    layers = config.get("text_config", config).get("num_hidden_layers")
    numbers = ((re.search(r"\blayers\.(\d+)\.", spec.name), spec) for spec in found)
    counted = (spec for number, spec in numbers if layers is None or number is None or int(number[1]) < layers)
    return sorted(counted, key=lambda spec: spec.name)


def has_files(folder: Path) -> bool:
    """Returns whether a model folder has the checkpoint itself, and not only its config."""
    return any(folder.glob("*.safetensors"))


def dtype_of(config: dict[str, Any]) -> str:
    """Returns the dtype that a config states for its weights, quantized ones aside."""
    text = config.get("text_config", {})
    named = next((d for c in (config, text) for k in ("dtype", "torch_dtype") if (d := c.get(k))), "bfloat16")
    return str(named).removeprefix("torch.")


def _of_config(config: dict[str, Any]) -> Iterator[TensorSpec]:
    model = _transformers_model({key: value for key, value in config.items() if key != "quantization_config"})
    block = _block(config.get("quantization_config"))
    if block is not None:
        _mark_quantized(model, config["quantization_config"])
    for name, tensor in _as_saved(model).items():
        yield TensorSpec.of(name, tensor)
        if block is not None and tensor.dtype == _QUANTIZED:
            rows, columns = tensor.shape
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


def presets() -> tuple[str, ...]:
    """Returns the names of the models whose published config.json ships with this package."""
    return tuple(sorted(p.name.removesuffix(".json") for p in _presets().iterdir() if p.name.endswith(".json")))


def prepare(model: str, layers: int, into: Path) -> Path:
    """Returns a folder with the model's config.json, cut to `layers` layers (0 for all).

    model  a preset's name in any case, a config.json, or a folder with one
    into   an empty folder, used unless the model's own folder can be used as it is

    Raises Mismatch when there is no such model, or when it has fewer layers.
    """
    path = Path(model or "/dev/null").expanduser()  # "" would be this folder
    folder = path if path.is_dir() else path.parent if path.name == CONFIG and path.is_file() else None
    if folder is not None:
        if not (folder / CONFIG).is_file():
            raise Mismatch(f"{folder} has no {CONFIG}")
        config = _read((folder / CONFIG).read_text(), str(folder / CONFIG))
        if not layers:
            return folder
        for file in (*folder.glob("*.py"), *folder.glob("*.safetensors")):  # its own code; its tensors' shapes
            (into / file.name).symlink_to(file.resolve())
    elif path.is_file():
        config = _read(path.read_text(), str(path))
    elif (name := model.lower()) in presets():
        config = _read((_presets() / f"{name}.json").read_text(), name)
    else:
        raise Mismatch(
            f"{model} is not a folder, a {CONFIG} or a preset; the presets are {', '.join(presets())}"
            f"{nearest(path.name, presets())}"
        )
    (into / CONFIG).write_text(json.dumps(with_layers(config, layers) if layers else config))
    return into


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Returns the config with only its first layers. Raises Mismatch when it has fewer."""
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise Mismatch(f"--layers {layers}: the text_config of the model's {CONFIG} is not a table")
    have = text.get("num_hidden_layers")
    if not isinstance(have, int) or have < layers:
        raise Mismatch(f"--layers {layers}: the model has {have} layers")
    lists = {key for key, value in text.items() if isinstance(value, list) and len(value) == have > 1}  # by layer
    shorter = {key: value[:layers] if key in lists else value for key, value in text.items()}
    shorter["num_hidden_layers"] = layers
    return config | {"text_config": shorter} if text is not config else shorter


def _read(text: str, where: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise Mismatch(f"{where} is not JSON: {error}") from None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise Mismatch(f"{where} names no architectures; give the config.json of a Hugging Face checkpoint")
    return config


def _presets() -> Any:
    return resources.files("sglang_reshard.cli.plan") / "presets"
