"""A draft model beside its target, as SGLang's draft worker builds it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from sglang_reshard.patches.draft_models import OWN, Drafts, TargetAndDrafts
from support.checkpoints import DRAFT, read_weights
from support.sglang_state import published_arguments


def with_draft(target: torch.nn.Module, folder: str) -> torch.nn.Module:
    """The target and the draft of this checkpoint, in a process that holds the target."""
    own = Path(folder) / DRAFT
    return TargetAndDrafts(target, Drafts([draft_of(target, str(own if own.exists() else folder))]))


def sent_with_draft(folder: str) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors and, under the names that an update has for them, those of the draft's own."""
    own = Path(folder) / DRAFT
    drafts = read_weights(own) if own.exists() else {}
    return read_weights(folder) | {OWN + name: tensor for name, tensor in drafts.items()}


def draft_of(target: Any, folder: str, layer: int = 0, load_format: str = "dummy") -> torch.nn.Module:
    """As SGLang's draft worker builds it, in a process that holds `target`. `layer`: of a draft of several."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model
    from sglang.srt.model_loader.utils import get_model_architecture

    config = ModelConfig.from_server_args(published_arguments(), model_path=folder, is_draft_model=True)
    # Of a draft of several layers, each of which is a model.
    takes_number = "draft_model_idx" in inspect.signature(get_model_architecture(config)[0]).parameters
    load = LoadConfig(load_format=load_format, draft_model_idx=layer if takes_number else None)
    draft: Any = get_model(model_config=config, load_config=load, device_config=DeviceConfig("cpu", 0))
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None  # for a GPU, of which the next line frees memory
    if not hasattr(draft, "set_embed_and_head"):  # it is given embeddings
        return draft
    embedding, head = target.get_embed_and_head()
    if isinstance(getattr(draft, "hot_token_id", 0), int) or draft.load_lm_head_from_target:
        draft.set_embed_and_head(embedding, head)
    else:
        draft.set_embed(embedding)
    return draft
