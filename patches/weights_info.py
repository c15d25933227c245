"""What the tokenizer manager knows of the live weights, for `GET /weights_info`.

    weights_info.record(manager, request, output)    # an update has succeeded; inside its lock
    weights_info.of(manager)

What it knows is forgotten when anything else writes weights, or takes them away.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from sglang_reshard.patches import torn, versions
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.protocol.weights_info import LayoutInfo, WeightsInfo
from sglang_reshard.version import __version__

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

RUNNING = "_reshard_running"  # on the manager: the update that is under way, in words
_LIVE = "_reshard_live"  # on the manager: how the live weights came
_MANAGER = "sglang.srt.managers.tokenizer_manager"
# All by which SGLang itself changes weights. Not all of its versions have all of them.
_OTHERS = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
)


def apply() -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for method in _OTHERS:
        if hasattr(TokenizerManager, method):
            HookRegistry.register(f"{_MANAGER}.TokenizerManager.{method}", _overwrite, HookType.AROUND)
    HookRegistry.register(f"{_MANAGER}.TokenizerManager.release_memory_occupation", _release, HookType.AROUND)


def record(
    manager: TokenizerManager, request: DistributedUpdateWeightsReq, output: DistributedUpdateWeightsOutput
) -> None:
    """Keep what an update that has succeeded says of the weights."""
    setattr(manager, _LIVE, (request, output))


def forget(manager: TokenizerManager) -> None:
    setattr(manager, _LIVE, None)


def of(manager: TokenizerManager) -> WeightsInfo:
    why_torn = torn.reason(manager)
    now = WeightsInfo(
        version=str(versions.weight_version(manager) or ""),
        package_version=__version__,
        torn=why_torn,
        under_way=bool(getattr(manager, RUNNING, "")),
    )
    live: tuple[DistributedUpdateWeightsReq, DistributedUpdateWeightsOutput] | None = getattr(manager, _LIVE, None)
    return now if live is None or why_torn else _with(now, *live)


def _with(
    now: WeightsInfo, request: DistributedUpdateWeightsReq, output: DistributedUpdateWeightsOutput
) -> WeightsInfo:
    return WeightsInfo(
        version=now.version,
        package_version=now.package_version,
        under_way=now.under_way,
        digest=output.digest,
        verified=request.verify,
        session=request.address.session,
        update=request.update,
        transport=output.transport,
        engine_ranks=len(output.ranks),
        layout=LayoutInfo(request.layout, len(request.trainer_hosts), output.tensors, output.source_bytes),
    )


Stock = Callable[..., Awaitable[Any]]


async def _overwrite(stock: Stock, manager: TokenizerManager, *args: Any, **kwargs: Any) -> Any:
    """Before, because weights change while it runs; after, because an update of ours may have ended meanwhile."""
    forget(manager)
    try:
        return await stock(manager, *args, **kwargs)
    finally:
        forget(manager)


async def _release(stock: Stock, manager: TokenizerManager, *args: Any, **kwargs: Any) -> Any:
    tags = (args[0] if args else kwargs["obj"]).tags
    takes_weights = not tags or "weights" in tags  # no tags are all of them
    return await (_overwrite(stock, manager, *args, **kwargs) if takes_weights else stock(manager, *args, **kwargs))
