"""Tiny checkpoints with random weights, under the names and in the shapes and dtypes of real ones.

transformers itself writes them: it keeps experts stacked in memory, and reverts that when it saves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from support.checkpoints import block_fp8
from support.checkpoints.published import Published, merged
from support.checkpoints.published_configs import published, published_multimodal
from support.checkpoints.published_dense import DENSE
from support.checkpoints.published_drafts import DRAFTS
from support.checkpoints.published_experts import EXPERTS
from support.checkpoints.published_multimodal import MULTIMODAL
from support.checkpoints.tiny_configs import IN_BLOCKS, TINY, tiny, variant

WEIGHTS = "model.safetensors"
DRAFT = "draft"  # the folder in a target's of a draft that has a checkpoint of its own
PUBLISHED = DENSE | EXPERTS | MULTIMODAL | DRAFTS


def write_checkpoint(
    writer: str,
    folder: Path,
    *,
    architecture: str | None = None,
    variants: Sequence[str] = (),
    instead: dict[str, Any] | None = None,
    fp8: bool = False,
    seed: int = 0,
) -> str | None:
    """A model folder as the transformers class `writer` saves it, with random weights.

    architecture  what SGLang is told to build, if that is not `writer`
    variants      of the config (tiny_configs.variant); None is returned when it has no such variant
    instead       other values for keys of the config
    fp8           with linear layers in block-fp8
    """
    import transformers
    from transformers import initialization
    from transformers.integrations import hub_kernels

    # Some layers would fetch kernels from the Hub; nothing is computed with here.
    vars(hub_kernels)["_kernels_available"] = False
    transformers.logging.disable_progress_bar()
    writing = getattr(transformers, writer)
    sizes = IN_BLOCKS if fp8 else TINY
    changes = [variant(writing.config_class, v, sizes) for v in variants]
    if None in changes:
        return None
    record = PUBLISHED.get(architecture or writer) or PUBLISHED.get(writer) or Published()
    other = merged(record.instead, {k: v for change in changes for k, v in (change or {}).items()})
    other = merged(other, instead or {})
    config = tiny(writing.config_class, sizes, **other)
    with initialization.no_init_weights(), _classes_of_transformers():
        model = writing._from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    block_fp8.mark_linear(model)
    model.save_pretrained(folder, max_shard_size="100GB")
    of_class = read_weights(folder)
    saved = record.tensors(of_class)
    weights = _randomised(saved, seed)
    written = json.loads((folder / "config.json").read_text())
    as_published = published_multimodal if isinstance(written.get("text_config"), dict) else published
    built = record.draft.target if record.draft else architecture or writer
    written = as_published(written | {"architectures": [built]}, list(of_class))
    written = record.config(written) if callable(record.config) else merged(written, record.config)
    if fp8:
        weights, written["quantization_config"] = block_fp8.quantized(weights, block_fp8.marked(saved))
    _write(folder, written, weights)
    if record.draft and record.draft.tensors:
        own = {"architectures": [architecture], "num_hidden_layers": 1, **record.draft.config}
        _write(folder / DRAFT, written | own, _randomised(record.draft.tensors(weights), seed + 1))
    return str(folder)


def _write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(weights, folder)


@contextmanager
def _classes_of_transformers() -> Iterator[None]:
    """Without the classes that SGLang has registered with AutoModel in their place."""
    from transformers import AutoModel

    registered = AutoModel._model_mapping._extra_content
    others = dict(registered)
    registered.clear()
    try:
        yield
    finally:
        registered.update(others)


def read_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(folder) / WEIGHTS)


def write_weights(weights: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def _randomised(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Normal numbers, and what is no float all zero."""
    generator = torch.Generator().manual_seed(seed)

    def random(like: torch.Tensor) -> Any:
        if not like.is_floating_point():
            return torch.zeros_like(like)
        return torch.randn(like.shape, generator=generator).to(like.dtype)

    return {name: random(tensor) for name, tensor in weights.items()}
