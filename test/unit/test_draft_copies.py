"""Copies of weights that a draft worker keeps, and that an update cannot write, refuse it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_reshard.patches.draft_models import unknown_reason


class DFlashWorker:
    """As SGLang's is, as far as its copies go."""

    def __init__(self, **copies: Any) -> None:
        self.model_runner = SimpleNamespace(model=torch.nn.Linear(2, 2), draft_model_idx=None)
        vars(self).update(copies)

    def _maybe_merge_trained_mask_embedding(self) -> None:
        """Only its name counts."""


def scheduler(worker: Any, folder: Path) -> Any:
    return SimpleNamespace(
        draft_worker=worker,
        spec_algorithm=SimpleNamespace(is_ngram=lambda: False),
        server_args=SimpleNamespace(speculative_draft_model_path=str(folder)),
    )


def test_a_gathered_embedding_is_named(tmp_path: Path) -> None:
    assert unknown_reason(scheduler(DFlashWorker(_full_embed_gpu=None), tmp_path)) == ""
    reason = unknown_reason(scheduler(DFlashWorker(_full_embed_gpu=torch.zeros(2, 2)), tmp_path))
    assert "gathered the target's embedding" in reason
    assert "draft=False" in reason


def test_a_mask_s_row_of_the_targets_embedding_is_named(tmp_path: Path) -> None:
    (tmp_path / "mask_embedding.pt").touch()
    reason = unknown_reason(scheduler(DFlashWorker(), tmp_path))
    assert f"{tmp_path}/mask_embedding.pt" in reason
    assert unknown_reason(scheduler(SimpleNamespace(model_runner=DFlashWorker().model_runner), tmp_path)) == ""
