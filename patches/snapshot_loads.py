"""Loads snapshots for those who follow a folder, in the order of publication only.

    await snapshot_loads.load(manager, request)    # POST /load_snapshot

An update may begin between a follower's look and its request, and end before SGLang lets the load through. So the
order is checked again under SGLang's own lock, right before its schedulers hear of the load.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from sglang_reshard.errors import EngineRefused
from sglang_reshard.patches import weights_info
from sglang_reshard.protocol.messages import LoadSnapshotOutput, LoadSnapshotReq

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_asked: ContextVar[LoadSnapshotReq | None] = ContextVar("sglang_reshard_load_snapshot", default=None)


class _LaterWeights(Exception):
    """The engine holds later weights than a snapshot that it was asked to load, or gets them just now."""


def apply() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_MANAGER}._wait_for_model_update_from_disk", _in_order, HookType.AROUND)


async def load(manager: TokenizerManager, request: LoadSnapshotReq) -> LoadSnapshotOutput:
    """Loads a snapshot by SGLang's own update_weights_from_disk, unless the engine holds later weights.

    Raises EngineRefused if SGLang cannot load it.
    """
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    token = _asked.set(request)
    try:
        _check_order(manager, request)
        # A server that was started on dummy weights has another format of its own.
        asked = UpdateWeightFromDiskReqInput(
            model_path=request.path, load_format="auto", weight_version=request.version
        )
        success, message, _ = await manager.update_weights_from_disk(asked)
    except _LaterWeights as error:
        return LoadSnapshotOutput(False, str(error))
    finally:
        _asked.reset(token)
    if not success:
        raise EngineRefused(f"SGLang cannot load {request.path}: {message}")
    return LoadSnapshotOutput(True)


async def _in_order(
    stock: Callable[..., Awaitable[tuple[bool, Any, Any]]], manager: TokenizerManager, *args: Any, **kwargs: Any
) -> tuple[bool, Any, Any]:
    asked = _asked.get()
    if asked is None:  # a user's own request, which leaves the order as it is
        return await stock(manager, *args, **kwargs)
    _check_order(manager, asked)
    outcome = await stock(manager, *args, **kwargs)
    if outcome[0]:
        weights_info.set_publication(manager, asked.publication)
    return outcome


def _check_order(manager: TokenizerManager, asked: LoadSnapshotReq) -> None:
    if asked.allow_rollback:
        return
    if running := weights_info.under_way(manager):
        raise _LaterWeights(running)
    if asked.publication < weights_info.publication(manager):
        raise _LaterWeights(
            f"the engine holds later weights than snapshot {asked.version!r}; pass allow_rollback (--allow-rollback) "
            "to load it anyway"
        )
