"""Finds a model's config.json: a named preset, a file, or a folder with one."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from sglang_reshard.errors import Mismatch
from sglang_reshard.nearest import nearest

CONFIG = "config.json"


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
    shorter = {key: value[:layers] if _is_by_layer(value, have) else value for key, value in text.items()}
    shorter["num_hidden_layers"] = layers
    return config | {"text_config": shorter} if text is not config else shorter


def _is_by_layer(value: Any, layers: int) -> bool:
    return isinstance(value, list) and len(value) == layers and layers > 1


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
