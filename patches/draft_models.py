"""The draft models of speculative decoding, which are updated with their target.

A draft may be a layer of the target's checkpoint (MTP, NEXTN), or a model with a separate checkpoint (EAGLE,
STANDALONE). SGLang replaces the embedding and the head of most by the target's tensors, so those follow it anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_reshard.patches import sglang_versions
from sglang_reshard.patches.draft_copies import FusedKeysAndValues, HotTokens, forget_shared, not_renewed

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

OWN = "draft."  # the prefix of names that are for drafts alone
_Weights = Iterable[tuple[str, torch.Tensor]]


class Drafts(NamedTuple):
    """The draft models on an engine rank.

    models      one per layer that a multi-layer draft has
    hot_tokens  int64[number of tokens], the tokens that they propose, the draft worker's own tensor; None if they
                propose all
    layers      of each model, its layer of a multi-layer draft; None for the model of another draft
    fused       the draft worker's object that keeps the weights of all keys and values of a DFLASH draft in one tensor
    """

    models: list[torch.nn.Module]
    hot_tokens: torch.Tensor | None = None
    layers: Sequence[int | None] = ()
    fused: Any = None


def drafts_of(scheduler: Scheduler) -> Drafts:
    """Returns the draft models on this engine rank."""
    worker = scheduler.draft_worker
    if worker is None or scheduler.spec_algorithm.is_ngram():  # n-grams have no weights
        return Drafts([])
    runners = sglang_versions.draft_runners(worker)
    layers = [runner.draft_model_idx for runner in runners]
    models, fused = [runner.model for runner in runners], sglang_versions.fused_keys_and_values(worker)
    return Drafts(models, sglang_versions.hot_tokens(worker), layers, fused)


def unknown_reason(scheduler: Scheduler) -> str:
    """Returns why the draft models cannot be updated; empty if they can, or if there are none."""
    if scheduler.draft_worker is None or scheduler.spec_algorithm.is_ngram():
        return ""
    if models := drafts_of(scheduler).models:
        return not_renewed(scheduler.draft_worker, models, scheduler.server_args)
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

    def __init__(self, target: torch.nn.Module, drafts: Drafts) -> None:
        super().__init__()
        self.target, self.draft_models = target, torch.nn.ModuleList(drafts.models)
        self._layers = tuple(drafts.layers) or (None,) * len(drafts.models)
        tokens = drafts.hot_tokens
        found = [] if tokens is None else [HotTokens(target, draft, tokens) for draft in drafts.models]
        forget_shared(target, drafts.models)
        self.copies = torch.nn.ModuleList(copies for copies in found if copies.exist)
        if drafts.fused is not None:
            self.copies.extend(FusedKeysAndValues(drafts.fused, draft) for draft in drafts.models)

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
        for draft, layer in zip(self.draft_models, self._layers, strict=True):
            draft.load_weights(_of_layer(iter(own or shared), layer))  # type: ignore[operator]
        for copies in self.copies:
            copies.post_load_weights()  # type: ignore[operator]


def _of_layer(weights: _Weights, layer: int | None) -> _Weights:
    """Yields the tensors that SGLang's loaders of checkpoints hand to the model of a layer of a multi-layer draft.

    They leave out those of the other layers, and give those of this layer the names of the first one. Some models pick
    their layer's tensors themselves.
    """
    if layer is None:
        return weights
    from sglang.srt.model_loader.loader import DefaultModelLoader

    return DefaultModelLoader._filter_mtp_weights(weights, "", layer)
