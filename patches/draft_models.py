"""The draft models of speculative decoding, which are updated with their target.

A draft may be a layer of the target's checkpoint (MTP, NEXTN), or a model with a separate checkpoint (EAGLE,
STANDALONE). SGLang replaces the embedding and the head of most by the target's tensors, so those follow it anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from sglang_reshard.patches import sglang_versions

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

OWN = "draft."  # the prefix of names that are for drafts alone
_Weights = Iterable[tuple[str, torch.Tensor]]


def draft_models(scheduler: Scheduler) -> list[torch.nn.Module]:
    """Returns the draft models on this engine rank, one per layer that a multi-layer draft has."""
    if scheduler.draft_worker is None or scheduler.spec_algorithm.is_ngram():  # n-grams have no weights
        return []
    return [runner.model for runner in sglang_versions.draft_runners(scheduler.draft_worker)]


def unknown_reason(scheduler: Scheduler) -> str:
    """Returns why the draft models cannot be updated; empty if they can, or if there are none."""
    if scheduler.draft_worker is None or scheduler.spec_algorithm.is_ngram() or draft_models(scheduler):
        return ""
    return (
        f"the draft models of a {type(scheduler.draft_worker).__name__} cannot be updated; pass draft=False to leave "
        "them as they are, or start the engine without speculative decoding"
    )


class TargetAndDrafts(torch.nn.Module):
    """Loads a target and its drafts from the same tensors.

    Drafts get the same tensors as the target, as in SGLang's own updates, unless some names begin with "draft.": these
    are for the drafts alone, without the prefix, and they get no others.
    """

    reshard_main = "target"  # see `trace.kept`

    def __init__(self, target: torch.nn.Module, drafts: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.target, self.draft_models = target, torch.nn.ModuleList(drafts)

    def load_weights(self, weights: _Weights) -> None:
        shared: list[tuple[str, torch.Tensor]] = []
        own: list[tuple[str, torch.Tensor]] = []

        def of_target() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name.startswith(OWN):
                    own.append((name.removeprefix(OWN), tensor))
                else:
                    shared.append((name, tensor))
                    yield name, tensor

        self.target.load_weights(of_target())  # type: ignore[operator]
        for draft in self.draft_models:
            draft.load_weights(iter(own or shared))  # type: ignore[operator]
