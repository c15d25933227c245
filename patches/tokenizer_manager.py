"""sglang.srt.managers.tokenizer_control_mixin: adds the update as a control request, under SGLang's own locks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from sglang_reshard.engine.trainer_presence import TrainerPresence
from sglang_reshard.errors import Mismatch, ReshardError
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.patches import (
    hooks,
    lora_names,
    metrics,
    prefill_decode,
    sglang_versions,
    sound_weights,
    weights_info,
)
from sglang_reshard.patches.attached import attached
from sglang_reshard.patches.io_struct import UpdateWeightsDistributedReqOutput
from sglang_reshard.patches.schedulers import ask_schedulers, asked, is_answered, silence, together
from sglang_reshard.patches.supported_engine import unreached, unsupported_reason
from sglang_reshard.patches.update_observer import observed
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    Step,
)
from sglang_reshard.protocol.validation import check_request

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = get_logger(__name__)
R = TypeVar("R")
T = TypeVar("T")
Work = Callable[["TokenizerManager", R], Coroutine[Any, Any, T]]
Check = Callable[[DistributedUpdateWeightsOutput], DistributedUpdateWeightsOutput]
_Outcome: TypeAlias = "asyncio.Future[DistributedUpdateWeightsOutput]"
_NAME = "update_weights_distributed"
_POLL_S = 0.02


def apply() -> None:
    from sglang.srt.managers import tokenizer_control_mixin as mixin

    if all(spec[0] != _NAME for spec in mixin._COMMUNICATOR_SPECS):
        mixin._COMMUNICATOR_SPECS.append((_NAME, UpdateWeightsDistributedReqOutput))
    mixin.TokenizerControlMixin.update_weights_distributed = update_weights_distributed


async def update_weights_distributed(
    self: TokenizerManager, request: DistributedUpdateWeightsReq
) -> DistributedUpdateWeightsOutput:
    """Sends the request to the schedulers while no generation request runs.

    A paused engine is updated at once; otherwise running requests finish first, as in SGLang's own weight updates.
    """
    try:
        check_request(request)
    except Mismatch as error:  # before it is logged, counted or sent on
        logger.warning("the engine refused an update: %s", error)
        return DistributedUpdateWeightsOutput(success=False, message=str(error), phase=metrics.REQUEST)
    return await _update_unless_busy(self, request)


@observed
async def _update_unless_busy(
    self: TokenizerManager, request: DistributedUpdateWeightsReq
) -> DistributedUpdateWeightsOutput:
    self.auto_create_handle_loop()
    if refusal := weights_info.under_way(self):
        return DistributedUpdateWeightsOutput(success=False, message=refusal)
    with weights_info.running(self, f"{request.name()} is running; repeat this one when it has ended"):
        return await run_update(self, request)


async def run_update(
    self: TokenizerManager, request: DistributedUpdateWeightsReq, check: Check | None = None
) -> DistributedUpdateWeightsOutput:
    """Runs an update; the caller has made sure that no other one runs.

    check  replaces the schedulers' answer before anybody uses the weights

    Returns a failure if the schedulers do not answer in time. Once they have been asked to write, their answer decides
    whether the weights are old, new or torn, however late it comes: the update goes on without this call then, also if
    this call is cancelled, and lets nobody use the weights until it has the answer.
    """
    overdue: _Outcome = asyncio.get_running_loop().create_future()  # has an error at the deadline
    update = asyncio.ensure_future(_run(self, request, overdue, check))
    with _cancelling(self, update):
        await asyncio.wait([update, overdue], return_when=asyncio.FIRST_COMPLETED)
        return (update if update.done() else overdue).result()


async def update_by_server(
    self: TokenizerManager, request: DistributedUpdateWeightsReq, check: Check | None = None
) -> DistributedUpdateWeightsOutput:
    """As `run_update`, of a request that the server itself makes: weights of the live version repair torn ones."""
    if request.weight_version == sglang_versions.weight_version(self):
        request = msgspec.structs.replace(request, weight_version=None)
    return await observed(functools.partial(run_update, check=check))(self, request)


def until_written(work: Work[R, T]) -> Work[R, T]:
    """Decorates a server's own update: cancelling its call cancels it, unless the schedulers write already."""

    @functools.wraps(work)
    async def run(manager: TokenizerManager, request: R) -> T:
        manager.auto_create_handle_loop()
        task = asyncio.ensure_future(work(manager, request))
        with _cancelling(manager, task):
            return await asyncio.shield(task)

    return run


@contextlib.contextmanager
def _cancelling(self: TokenizerManager, task: asyncio.Future[Any]) -> Iterator[None]:
    """Cancels the task if the block is cancelled, unless the schedulers write: then it goes on to their answer."""
    try:
        yield
    except asyncio.CancelledError:
        if not weights_info.of(self).unanswered:
            task.cancel()
        raise


async def _run(
    self: TokenizerManager, request: DistributedUpdateWeightsReq, overdue: _Outcome, check: Check | None
) -> DistributedUpdateWeightsOutput:
    if refusal := _refusal(self, request) or await _missing(self, request):
        return DistributedUpdateWeightsOutput(success=False, message=refusal)
    await weights_info.unshared(self)
    request = sound_weights.told(self, request)
    if not request.lora:
        return await _update(self, request, overdue, check)
    async with self.lora_update_lock:
        return await _update(self, lora_names.with_lora_ids(self, request), overdue, check)


async def _update(
    self: TokenizerManager, request: DistributedUpdateWeightsReq, overdue: _Outcome, check: Check | None
) -> DistributedUpdateWeightsOutput:
    step: Step = "update"
    if request.staged:  # requests are served with the old weights until the new ones have arrived
        output = await ask_schedulers(self, request, "stage")
        while output.success and (output := await ask_schedulers(self, request, "staged")).under_way:
            await asyncio.sleep(_POLL_S)
        if not output.success:
            return output
        step = "commit"
    if request.abort_all_requests:
        self.abort_request(abort_all=True)
    async with self.is_pause_cond:  # held during the update, so that the pause cannot be lifted
        paused = self.is_pause
        if paused:
            output = await _write(self, request, step, overdue, check)
    if not paused:
        if refusal := prefill_decode.refusal(self, request):  # the pause has been lifted since `_refusal`
            return DistributedUpdateWeightsOutput(success=False, message=refusal)
        async with self.model_update_lock.writer_lock:
            output = await _write(self, request, step, overdue, check)
    return output


async def _write(
    self: TokenizerManager, request: DistributedUpdateWeightsReq, step: Step, overdue: _Outcome, check: Check | None
) -> DistributedUpdateWeightsOutput:
    """Lets the schedulers write the weights, and waits for their answer. Lets nobody use torn weights.

    At the deadline `overdue` gets the error of a missing answer.
    """
    unanswered = f"the engine's schedulers have not answered {request.name()} yet"
    with weights_info.running(self, unanswered, "unanswered"):
        answer = asked(self, request, step)
        if not await is_answered(answer, request):
            message = f"{silence(request)}. Requests wait until they do"
            logger.error("%s: %s", request.name(), message)
            overdue.set_result(DistributedUpdateWeightsOutput(success=False, message=message, phase=metrics.ENGINE))
        replies = await answer
        try:
            output = together(replies)
            if check is not None:
                output = check(output)
        except Mismatch as error:
            why = f"the answer of the engine's schedulers to {request.name()} was lost: {error}"
            output = DistributedUpdateWeightsOutput(success=False, message=why, torn=True, phase=metrics.ENGINE)
        if output.success:
            if not request.lora:
                sound_weights.heal(self)
                sound_weights.written(self)
                output = weights_info.record(self, request, output)
                messages = output.message, unreached(self.server_args)
                output = msgspec.structs.replace(output, message="; ".join(filter(None, messages)))
            else:
                await lora_names.updated(self, request)
            self._update_weight_version_if_provided(request.weight_version)
        elif output.torn and request.lora:
            lora_names.unload(self, request.lora, output.message)
        elif output.torn:
            sound_weights.mark(self, output.message)
            weights_info.clear(self, "an update that failed")  # its engine ranks may all have written
    return output


async def _missing(manager: TokenizerManager, request: DistributedUpdateWeightsReq) -> str:
    """Returns which of the engine's processes lack these patches, or why an update would wait for its trainer; empty if
    nothing is missing. Locks nothing.
    """
    try:
        await hooks.check(manager, request.timeout_s)
        await asyncio.to_thread(attached(manager, TrainerPresence).find, request)
    except ReshardError as error:
        return str(error)
    return ""


def _refusal(manager: TokenizerManager, request: DistributedUpdateWeightsReq) -> str:
    """Returns why the update is refused before the schedulers are asked; empty if it is not."""
    if reason := unsupported_reason(manager.server_args):
        return reason
    if reason := prefill_decode.refusal(manager, request):
        return reason
    if request.staged and manager.server_args.pp_size > 1:
        return (
            f"staged=True with pp_size={manager.server_args.pp_size} is not supported: pipeline stages are updated "
            "while no request runs. Pass staged=False"
        )
    if request.lora and (reason := lora_names.refusal(manager, request.lora)):
        return reason
    if reason := lora_names.counted_twice(manager, request):
        return reason
    if request.weight_version is not None and request.weight_version == sglang_versions.weight_version(manager):
        return (
            f"the engine's weights are already version {request.weight_version!r}; "
            "pass a different weight_version to every update, or none"
        )
    return ""
