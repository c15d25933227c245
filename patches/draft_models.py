"""The draft models of speculative decoding, which are updated with their target.

A draft may be a layer of the target's checkpoint (MTP, NEXTN), or a model with a separate checkpoint (EAGLE,
STANDALONE). SGLang replaces the embedding and the head of most by the target's tensors, so those follow it anyway.
Draft workers copy other weights when they start, to tensors outside of the models. An update writes these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
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


def not_renewed(worker: Any, models: Iterable[torch.nn.Module], server_args: Any) -> str:
    """Returns why an update would leave copies of old weights in a draft worker or its models; empty if it would not.

    They are workers of DFLASH and DSPARK, from 0.5.23 or so.
    """
    if getattr(worker, "_full_embed_gpu", None) is not None:
        return (
            "the DFLASH draft worker has gathered the target's embedding for data parallel attention, and an update "
            "does not gather it again; pass draft=False to accept worse drafts, or start without enable_dp_attention"
        )
    folder = getattr(server_args, "speculative_draft_model_path", None)
    merges = hasattr(worker, "_maybe_merge_trained_mask_embedding")
    if merges and folder and (Path(folder) / "mask_embedding.pt").exists():
        return (
            f"SGLang has written {folder}/mask_embedding.pt to a row of the target's embedding, and an update would "
            "overwrite the row; write it to the embedding that you send, and pass draft=False"
        )
    if any(getattr(model, "lilicorr", None) is not None for model in models):
        return (
            "the draft's LiLiCorr head merges weights when the engine starts, and an update does not merge them again; "
            "pass draft=False to accept worse drafts"
        )
    if any(hasattr(model, "_fused_kv_write_cache") for model in models) and not server_args.disable_cuda_graph:
        return (
            "a DSPARK draft stacks the weights of its keys and values in its first forward pass, and CUDA graphs hold "
            "their addresses; pass draft=False to accept worse drafts, or start with disable_cuda_graph=True"
        )
    return ""


def forget_shared(target: torch.nn.Module, drafts: Iterable[torch.nn.Module]) -> None:
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


class HotTokens(torch.nn.Module):
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


class FusedKeysAndValues(torch.nn.Module):
    """A DFLASH draft worker's copies of the weights of all layers' keys and values, which it keeps on GPUs."""

    def __init__(self, fused: Any, draft: torch.nn.Module) -> None:
        super().__init__()
        self._of = fused, draft  # a tuple, so that they do not become children of this module
        for name, tensor in vars(fused).items():
            if isinstance(tensor, torch.Tensor) and not name.startswith("_"):  # else it is a workspace
                self.register_buffer(name, tensor, persistent=False)

    @torch.no_grad()
    def post_load_weights(self) -> None:
        fused, draft = self._of
        new = type(fused)(
            layers=draft.layers,
            rotary_emb=fused.rotary_emb,
            num_kv_heads=fused.num_kv_heads,
            head_dim=fused.head_dim,
            device=fused.device,
        )
        for name, tensor in self.named_buffers():  # in place: CUDA graphs have their addresses
            tensor.copy_(getattr(new, name))
