"""sglang.srt.model_executor.model_runner: executes an update on the live parameters.

Drops what holds pages of the weights before the memory saver releases them: it maps other pages at the same addresses
when it resumes. Memory that is registered with NIXL then, or read by an update, would be the old pages: weights would
arrive where nobody looks. Addresses do not tell.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sglang_reshard.derived import remember_loaded
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.patches import engine_start, repacking, sglang_versions
from sglang_reshard.patches.attached import attached
from sglang_reshard.patches.draft_models import Drafts, TargetAndDrafts
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

logger = get_logger(__name__)
_WEIGHTS = "weights"  # the memory saver's tag of SGLang's weights
_IN_PROGRESS = DistributedUpdateWeightsOutput(success=True, message="", under_way=True)
receivers: weakref.WeakSet[WeightReceiver] = weakref.WeakSet()  # of live weights, in this process


@dataclass
class Updated:
    """Keeps the state of the updates of one model runner."""

    receiver: WeightReceiver | None = None  # of the live weights
    drafts: list[torch.nn.Module] = field(default_factory=list)  # that the receiver updates
    live: LiveWeights | None = None  # shares them with other engines
    repacked: str | None = None  # why they cannot be updated; None until that is known


def remember(_result: Any, runner: ModelRunner, *_: Any, **__: Any) -> None:
    note_copies(runner.model)
    remember_loaded(runner.model)
    engine_start.remember_start(runner)


def update_weights_distributed(
    runner: ModelRunner, request: DistributedUpdateWeightsReq, step: Step, refusal: str, drafts: Drafts
) -> DistributedUpdateWeightsOutput:
    """Executes a step of an update on this engine rank.

    refusal  why this rank must not be updated, or empty
    drafts   the draft models that are updated with the model
    """
    device = next(runner.model.parameters()).device
    receiver = _receiver(runner, request, drafts, device)
    if step == "staged":
        return receiver.staged() or _IN_PROGRESS
    refusal = refusal or _refusal(runner, request) or next(filter(None, map(_draft_refusal, drafts.models)), "")
    if step == "stage":
        return receiver.stage(request, refusal)
    # A forward pass in flight still reads the old weights. Not every one runs in SGLang's forward_stream: without the
    # overlap schedule it is the scheduler's, with PD multiplexing one of several.
    runtime().synchronize([device])
    run = receiver.commit if step == "commit" else receiver.update
    return run(request, refusal)


def loaded_by_stock(runner: ModelRunner) -> None:
    """SGLang itself has loaded all weights on all engine ranks."""
    if (receiver := attached(runner, Updated).receiver) is not None:
        receiver.written_by_others()


def share_weights(runner: ModelRunner, request: ShareWeightsReq) -> DistributedUpdateWeightsOutput:
    """Begins to share this engine rank's live weights with another engine."""
    updated = attached(runner, Updated)
    if updated.live is None:
        from sglang_reshard.extras.replicas.share import LiveWeights

        if updated.receiver is None:  # the tokenizer manager knows better, unless an update has just failed
            return DistributedUpdateWeightsOutput(success=False, message="no update has brought the live weights")
        rank, size = sglang_versions.engine_rank(runner)
        updated.live = LiveWeights(updated.receiver, rank, size, next(runner.model.parameters()).device)
    return updated.live.start(request)


def placement() -> bytes:
    """Returns the physical to logical map of experts of all layers; empty if they are in the order of the checkpoint.

    The loader asks for it, so a trace is of one placement. EPLB moves experts between forward passes, in place.
    """
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    metadata = get_global_expert_location_metadata()
    return b"" if metadata is None else bytes(metadata.physical_to_logical_map_cpu.contiguous().numpy().tobytes())


def before_pause(_adapter: Any, tag: str | None = None, *_: Any, **__: Any) -> None:
    for receiver in list(receivers) if tag in (None, _WEIGHTS) else ():  # None: all
        _release_pages(receiver)


def _release_pages(receiver: WeightReceiver) -> None:
    try:
        receiver.release_pages()
    except Exception:  # it would end the scheduler
        logger.exception("registrations of the weights' memory could not be dropped before the memory is released")


def _receiver(
    runner: ModelRunner, request: DistributedUpdateWeightsReq, drafts: Drafts, device: torch.device
) -> WeightReceiver:
    """Returns what receives the model's weights, with those of its drafts, or those of LoRA adapters."""
    if request.lora:
        from sglang_reshard.patches import lora_adapters

        return lora_adapters.receiver(runner, request, *sglang_versions.engine_rank(runner))
    updated = attached(runner, Updated)
    if updated.receiver is not None and updated.drafts != drafts.models:  # the sender's option has changed
        updated.receiver.close()
        updated.receiver = updated.live = None
    if updated.receiver is None:
        from sglang_reshard.engine.receiver import WeightReceiver
        from sglang_reshard.engine.targets import TracedModel

        rank, size = sglang_versions.engine_rank(runner)
        model = TargetAndDrafts(runner.model, drafts) if drafts.models else runner.model
        start = functools.partial(engine_start.engine_start, runner, drafts.models)
        graphs = sglang_versions.holds_graphs(runner)
        target = TracedModel(model, placement, start, addresses_stay=graphs)
        updated.receiver, updated.drafts = WeightReceiver(target, rank, size, device), drafts.models
        receivers.add(updated.receiver)
    return updated.receiver


def _refusal(runner: ModelRunner, request: DistributedUpdateWeightsReq) -> str:
    """Returns why this engine must not be updated, however often one tries; empty if it can."""
    if request.lora:
        from sglang_reshard.patches import lora_adapters

        return lora_adapters.refusal(runner, request.lora)
    # Repacking depends on how the engine was started, so the modules need to be checked only once.
    updated = attached(runner, Updated)
    if updated.repacked is None:
        updated.repacked = repacking.refusal(runner.model)
    # SGLang's own can change: some flags are set by a forward pass.
    return updated.repacked or sglang_versions.online_updates_refused(runner.model)


def _draft_refusal(draft: torch.nn.Module) -> str:
    return repacking.refusal(draft) or sglang_versions.online_updates_refused(draft)
