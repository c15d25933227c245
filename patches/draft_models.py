"""The draft models of speculative decoding, which are updated with their target.

A draft may be a layer of the target's checkpoint (MTP, NEXTN), or a model with a separate checkpoint (EAGLE,
STANDALONE). SGLang replaces the embedding and the head of most by the target's tensors, so those follow it anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_reshard.patches import sglang_versions
from sglang_reshard.trace import built_modules
from sglang_reshard.trace.live import storage_key

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

OWN = "draft."  # the prefix of names that are for drafts alone
_Weights = Iterable[tuple[str, torch.Tensor]]


class Drafts(NamedTuple):
    """The draft models on an engine rank.

    models      one per layer that a multi-layer draft has
    hot_tokens  int64[number of tokens], the tokens that they propose, the draft worker's own tensor; None if they
                propose all
    """

    models: list[torch.nn.Module]
    hot_tokens: torch.Tensor | None = None


def drafts_of(scheduler: Scheduler) -> Drafts:
    """Returns the draft models on this engine rank."""
    worker = scheduler.draft_worker
    if worker is None or scheduler.spec_algorithm.is_ngram():  # n-grams have no weights
        return Drafts([])
    models = [runner.model for runner in sglang_versions.draft_runners(worker)]
    return Drafts(models, sglang_versions.hot_tokens(worker))


def unknown_reason(scheduler: Scheduler) -> str:
    """Returns why the draft models cannot be updated; empty if they can, or if there are none."""
    if scheduler.draft_worker is None or scheduler.spec_algorithm.is_ngram() or drafts_of(scheduler).models:
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

    def __init__(self, target: torch.nn.Module, drafts: Drafts) -> None:
        super().__init__()
        self.target, self.draft_models = target, torch.nn.ModuleList(drafts.models)
        tokens = drafts.hot_tokens
        found = [] if tokens is None else [_HotTokens(target, draft, tokens) for draft in drafts.models]
        _forget_shared(target, drafts.models)
        self.hot_tokens = torch.nn.ModuleList(copies for copies in found if copies.exist)

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
        for copies in self.hot_tokens:
            copies.post_load_weights()  # type: ignore[operator]


def _forget_shared(target: torch.nn.Module, drafts: Iterable[torch.nn.Module]) -> None:
    """Forgets how draft modules were built whose weights SGLang has replaced by parts of the target's weights."""
    memory = {storage_key(parameter) for parameter in target.parameters()}
    for draft in drafts:
        for module, weight in _replaced(draft):
            if storage_key(weight) in memory:
                built_modules.forget(module)


def _replaced(draft: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, torch.Tensor]]:
    """Yields the modules whose parameter `weight` SGLang has replaced by a tensor, and the tensor.

    torch keeps such a tensor among the attributes.
    """
    for module in draft.modules():
        if isinstance(weight := vars(module).get("weight"), torch.Tensor):
            yield module, weight


class _HotTokens(torch.nn.Module):
    """The copies that SGLang makes at the start for a draft that proposes only some tokens.

    With `speculative_token_map` the draft's head is a copy of the rows of these tokens in the target's head. An EAGLE-3
    draft loads the tokens from its checkpoint, and its draft worker keeps a copy of them on the GPU.
    """

    tokens: torch.Tensor
    head: torch.Tensor | None

    def __init__(self, target: Any, draft: torch.nn.Module, tokens: torch.Tensor) -> None:
        super().__init__()
        self._models = target, draft  # a tuple, so that they do not become children of this module
        self.register_buffer("tokens", tokens, persistent=False)
        self.register_buffer("head", None, persistent=False)
        for module, weight in _replaced(draft):
            if len(weight) == len(tokens):
                built_modules.forget(module)
                self.head = weight

    @property
    def exist(self) -> bool:
        return self.head is not None or self._loaded is not None

    @property
    def _loaded(self) -> torch.Tensor | None:
        """The tokens that the draft has loaded, if the worker's are a copy."""
        loaded = getattr(self._models[1], "hot_token_id", None)
        return loaded if isinstance(loaded, torch.Tensor) and loaded is not self.tokens else None

    @torch.no_grad()
    def post_load_weights(self) -> None:
        target, _ = self._models
        if (loaded := self._loaded) is not None:
            self.tokens.copy_(loaded)
        if self.head is not None:
            _, head = target.get_embed_and_head()
            torch.index_select(head.data, 0, self.tokens, out=self.head.data)
