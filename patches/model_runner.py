"""sglang.srt.model_executor.model_runner: executes an update on the live parameters."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from sglang_reshard.derived import remember_loaded
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.patches import engine_start, expert_location, repacking, sglang_versions
from sglang_reshard.patches.draft_models import Drafts, TargetAndDrafts
from sglang_reshard.patches.engine_rank import engine_rank
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    ShareWeightsReq,
    Step,
)
from sglang_reshard.trace.built_modules import note_copies

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_reshard.engine.receiver import WeightReceiver
    from sglang_reshard.extras.replicas.share import LiveWeights

_LOAD = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
_IN_PROGRESS = DistributedUpdateWeightsOutput(success=True, message="", under_way=True)
# On the model runner:
_RECEIVER, _REPACKED, _LIVE = "_reshard_receiver", "_reshard_repacked", "_reshard_live"
_DRAFTS = "_reshard_drafts"  # the draft models that the receiver updates
receivers: weakref.WeakSet[WeightReceiver] = weakref.WeakSet()  # of live weights, in this process


def apply() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    ModelRunner.update_weights_distributed = update_weights_distributed
    ModelRunner.share_weights = share_weights
    HookRegistry.register(_LOAD, _remember, HookType.AFTER)


def _remember(_result: Any, runner: ModelRunner, *_: Any, **__: Any) -> None:
    note_copies(runner.model)
    remember_loaded(runner.model)
    engine_start.remember_start(runner)


def update_weights_distributed(
    self: ModelRunner, request: DistributedUpdateWeightsReq, step: Step, refusal: str, drafts: Drafts
) -> DistributedUpdateWeightsOutput:
    """Executes a step of an update on this engine rank.

    refusal  why this rank must not be updated, or empty
    drafts   the draft models that are updated with the model
    """
    device = next(self.model.parameters()).device
    receiver = _receiver(self, request, drafts, device)
    if step == "staged":
        return receiver.staged() or _IN_PROGRESS
    refusal = refusal or _refusal(self, request) or next(filter(None, map(_draft_refusal, drafts.models)), "")
    if step == "stage":
        return receiver.stage(request, refusal)
    # A forward pass in flight still reads the old weights. Not every one runs in SGLang's forward_stream: without the
    # overlap schedule it is the scheduler's, with PD multiplexing one of several.
    runtime().synchronize([device])
    run = receiver.commit if step == "commit" else receiver.update
    return run(request, refusal)


def loaded_by_stock(runner: ModelRunner) -> None:
    """SGLang itself has loaded all weights on all engine ranks."""
    receiver: WeightReceiver | None = getattr(runner, _RECEIVER, None)
    if receiver is not None:
        receiver.written_by_others()


def share_weights(self: ModelRunner, request: ShareWeightsReq) -> DistributedUpdateWeightsOutput:
    """Begins to share this engine rank's live weights with another engine."""
    live: LiveWeights | None = getattr(self, _LIVE, None)
    if live is None:
        from sglang_reshard.extras.replicas.share import LiveWeights

        receiver: WeightReceiver | None = getattr(self, _RECEIVER, None)
        if receiver is None:  # the tokenizer manager knows better, unless an update has just failed
            return DistributedUpdateWeightsOutput(success=False, message="no update has brought the live weights")
        rank, size = engine_rank(self)
        live = LiveWeights(receiver, rank, size, next(self.model.parameters()).device)
        setattr(self, _LIVE, live)
    return live.start(request)


def _receiver(
    runner: ModelRunner, request: DistributedUpdateWeightsReq, drafts: Drafts, device: torch.device
) -> WeightReceiver:
    """Returns what receives the model's weights, with those of its drafts, or those of a LoRA adapter."""
    if request.lora is not None:
        from sglang_reshard.patches import lora_adapters

        return lora_adapters.receiver(runner, request.lora, *engine_rank(runner))
    receiver: WeightReceiver | None = getattr(runner, _RECEIVER, None)
    if receiver is not None and getattr(runner, _DRAFTS) != drafts.models:  # the sender's option has changed
        receiver.close()
        vars(runner).pop(_LIVE, None)
        receiver = None
    if receiver is None:
        from sglang_reshard.engine.receiver import WeightReceiver
        from sglang_reshard.engine.targets import TracedModel

        rank, size = engine_rank(runner)
        model = TargetAndDrafts(runner.model, drafts) if drafts.models else runner.model
        start = functools.partial(engine_start.engine_start, runner, drafts.models)
        graphs = sglang_versions.holds_graphs(runner)
        target = TracedModel(model, expert_location.placement, start, addresses_stay=graphs)
        receiver = WeightReceiver(target, rank, size, device)
        setattr(runner, _RECEIVER, receiver)
        receivers.add(receiver)
        setattr(runner, _DRAFTS, drafts.models)
    return receiver


def _refusal(runner: ModelRunner, request: DistributedUpdateWeightsReq) -> str:
    """Returns why this engine must not be updated, however often one tries; empty if it can."""
    if request.lora is not None:
        from sglang_reshard.patches import lora_adapters

        return lora_adapters.refusal(runner, request.lora)
    # Repacking depends on how the engine was started, so the modules need to be checked only once.
    known: str | None = getattr(runner, _REPACKED, None)
    if known is None:
        known = repacking.refusal(runner.model)
        setattr(runner, _REPACKED, known)
    # SGLang's own can change: some flags are set by a forward pass.
    return known or sglang_versions.online_updates_refused(runner.model)


def _draft_refusal(draft: torch.nn.Module) -> str:
    return repacking.refusal(draft) or sglang_versions.online_updates_refused(draft)
