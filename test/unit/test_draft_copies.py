"""Copies of weights that a draft worker keeps, and that an update cannot write, refuse it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
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


def of_model(**copies: Any) -> DFlashWorker:
    worker = DFlashWorker()
    for name, copy in copies.items():
        setattr(worker.model_runner.model, name, copy)
    return worker


@pytest.mark.parametrize(
    ("worker", "options", "says"),
    [
        (DFlashWorker(_full_embed_gpu=None), {}, ""),
        (DFlashWorker(_full_embed_gpu=torch.zeros(2, 2)), {}, r"gathered the target's embedding.*draft=False"),
        # Without graphs they are dropped as other derived state, and the next forward pass stacks them again.
        (of_model(_fused_kv_write_cache=None), {}, "disable_cuda_graph=True"),
        (of_model(_fused_kv_write_cache=None), {"disable_cuda_graph": True}, ""),
        # Nothing computes them again: a draft without them would end the engine in the next forward pass.
        (of_model(lilicorr=None), {}, ""),
        (of_model(lilicorr=torch.nn.Linear(2, 2)), {}, "LiLiCorr"),
    ],
)
def test_a_copy_that_an_update_cannot_write_is_named(worker: Any, options: Any, says: str, tmp_path: Path) -> None:
    reason = unknown_reason(scheduler(worker, tmp_path, **options))
    assert bool(reason) == bool(says)
    assert re.search(says, reason)


def test_a_mask_s_row_of_the_targets_embedding_is_named(tmp_path: Path) -> None:
    (tmp_path / "mask_embedding.pt").touch()
    reason = unknown_reason(scheduler(DFlashWorker(), tmp_path))
    assert f"{tmp_path}/mask_embedding.pt" in reason
    assert unknown_reason(scheduler(SimpleNamespace(model_runner=DFlashWorker().model_runner), tmp_path)) == ""
