"""Finds out how SGLang's own update_weights_from_disk has left an engine's weights.

SGLang answers when one rank of each data parallel replica has loaded, whether the checkpoint has all weights or not. So
all engine ranks are asked afterwards, under the lock of the load:

    none has begun to write        nothing has changed
    all have loaded                the weights are sound if they were. They are sound again, or no longer missing, or
                                   all of the version that the load names, only if the checkpoint fills every parameter
                                   of every rank
    anything else                  torn: SGLang rolls a failed load back by loading the same files again
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from sglang_reshard.errors import ReshardError
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.patches import engine_start, model_runner, sound_weights, weights_info
from sglang_reshard.patches.schedulers import asked, is_answered, silence
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, StockLoadReq
from sglang_reshard.trace.tracer import trace

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = get_logger(__name__)
_UNTOUCHED, _LOADED = "untouched", ""
_Outcome = tuple[Any, Any, Any]  # success, message, and the number of paused requests


class _Loads:
    """The loads of this scheduler's models since it was asked last. failed: why one of them did; empty if none has"""

    begun, failed = False, ""


_loads = _Loads()


def forget() -> None:
    """Must be called when a scheduler has started: what has been loaded until then is no update."""
    _loads.begun, _loads.failed = False, ""


def note_load(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _loads.begun = True
    try:
        return stock(*args, **kwargs)
    except Exception as error:
        _loads.failed = f"{type(error).__name__}: {error}"
        raise


def loaded(scheduler: Scheduler, request: StockLoadReq) -> DistributedUpdateWeightsOutput:
    """Returns how the last load from disk has ended, the same on all engine ranks of this replica. Collective."""
    from sglang.srt.distributed.parallel_state import get_world_group

    runner = scheduler.tp_worker.model_runner
    own = _loads.failed or (_LOADED if _loads.begun else _UNTOUCHED)
    failed = bool(_loads.failed)
    if own == _LOADED and request.complete:
        own = _lacking(runner)
    forget()
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (own, failed), group=get_world_group().cpu_group)
    whys = [f"engine rank {rank}: {why}" for rank, (why, _) in enumerate(of_ranks) if why not in (_UNTOUCHED, _LOADED)]
    untouched = [why == _UNTOUCHED for why, _ in of_ranks]
    torn = any(rank_failed for _, rank_failed in of_ranks) or (any(untouched) and not all(untouched))
    message = whys[0] if whys else "some engine ranks have loaded the files, and others have not" if torn else ""
    success = not torn and not whys and not any(untouched)
    if success:
        model_runner.loaded_by_stock(runner)
    return DistributedUpdateWeightsOutput(success=success, message=message, torn=torn)


def _lacking(runner: Any) -> str:
    """Returns why the files that were loaded may not have filled every parameter; empty if they have."""
    try:
        specs = engine_start.checkpoint_specs(runner)
        trace(runner.model, specs, lambda: engine_start.engine_start(runner, []))
    except (ReshardError, OSError, ValueError) as error:
        return str(error)
    return ""


async def update_from_disk(
    stock: Callable[..., Awaitable[_Outcome]], manager: TokenizerManager, obj: Any, *args: Any, **kwargs: Any
) -> _Outcome:
    unsound = sound_weights.torn(manager) or sound_weights.missing(manager)
    success, message, paused = await stock(manager, obj, *args, **kwargs)
    request = StockLoadReq(complete=success and (bool(unsound) or obj.weight_version is not None))
    answer = asked(manager, request, "loaded")
    if not await is_answered(answer, request):
        sound_weights.mark(manager, f"after a load from disk {silence(request)}")
        return False, silence(request), paused
    replicas = [reply.open() for reply in answer.result()]
    why = next((replica.message for replica in replicas if replica.message), "")
    if all(replica.success for replica in replicas):
        sound_weights.heal(manager)
        sound_weights.loaded(manager)
        if request.complete:
            weights_info.of(manager).whole_load = True
        return success, message, paused
    if any(replica.torn for replica in replicas) or len({replica.success for replica in replicas}) > 1:
        sound_weights.mark(manager, f"a load from disk failed while weights were being written: {why or message}")
        return False, f"{message} The weights are torn: {why}", paused
    if success and unsound:
        logger.error("The load from disk does not end this: %s. %s", unsound, why)
        return False, f"The files were loaded, but the engine still serves no request: {why}", paused
    return success, message, paused
