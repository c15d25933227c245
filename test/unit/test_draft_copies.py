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


def scheduler(worker: Any, folder: Path, disable_cuda_graph: bool = False) -> Any:
    return SimpleNamespace(
        draft_worker=worker,
        spec_algorithm=SimpleNamespace(is_ngram=lambda: False),
        server_args=SimpleNamespace(speculative_draft_model_path=str(folder), disable_cuda_graph=disable_cuda_graph),
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


def test_stacked_weights_in_cuda_graphs_are_named(tmp_path: Path) -> None:
    """Without graphs they are dropped as other derived state, and the next forward pass stacks them again."""
    worker = DFlashWorker()
    worker.model_runner.model._fused_kv_write_cache = None
    assert "disable_cuda_graph=True" in unknown_reason(scheduler(worker, tmp_path))
    assert unknown_reason(scheduler(worker, tmp_path, disable_cuda_graph=True)) == ""


def test_merged_weights_are_named(tmp_path: Path) -> None:
    """Nothing computes them again: a draft without them would end the engine in the next forward pass."""
    worker = DFlashWorker()
    worker.model_runner.model.lilicorr = None
    assert unknown_reason(scheduler(worker, tmp_path)) == ""
    worker.model_runner.model.lilicorr = torch.nn.Linear(2, 2)
    assert "LiLiCorr" in unknown_reason(scheduler(worker, tmp_path))
