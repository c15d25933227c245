"""Records which weights are live in the tokenizer manager, for `GET /weights_info`.

    weights_info.record(manager, request, output)    # after a successful update, inside its lock
    weights_info.current(manager)

The record is cleared when anything else writes or releases weights. That waits while the weights are shared with other
engines (`weights_sharing`), and so does an update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_reshard.patches import sglang_versions, stock_weights, torn_weights
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.protocol.weights_info import LayoutInfo, WeightsInfo
from sglang_reshard.version import __version__

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

RUNNING = "_reshard_running"  # on the manager: describes the update in progress
_SHARES = "_reshard_shares"  # on the manager: tasks, each of which shares the weights with another engine
_PUBLICATION = "_reshard_publication"  # on the manager: the latest that it holds or has held
_LIVE = "_reshard_live"  # on the manager: request and output of the update that wrote the live weights
_MANAGER = "sglang.srt.managers.tokenizer_manager"
# The methods by which SGLang itself changes weights. Not all of its versions have all of them.
_STOCK_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
)


def apply() -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for method in _STOCK_UPDATES:
        if hasattr(TokenizerManager, method):
            HookRegistry.register(f"{_MANAGER}.TokenizerManager.{method}", _around_write, HookType.AROUND)
    HookRegistry.register(f"{_MANAGER}.TokenizerManager.release_memory_occupation", _around_release, HookType.AROUND)


def record(
    manager: TokenizerManager, request: DistributedUpdateWeightsReq, output: DistributedUpdateWeightsOutput
) -> None:
    """Records a successful update as the origin of the live weights."""
    setattr(manager, _LIVE, (request, output))
    set_publication(manager, max(request.publication, publication(manager)))


def publication(manager: TokenizerManager) -> int:
    """Returns the latest publication that the engine holds or has held, see `protocol.publication`; 0 if none."""
    return int(getattr(manager, _PUBLICATION, 0))


def set_publication(manager: TokenizerManager, number: int) -> None:
    setattr(manager, _PUBLICATION, number)


@contextmanager
def running(manager: TokenizerManager, description: str) -> Iterator[None]:
    """Around an update: others are refused with the description, and weights are not shared."""
    setattr(manager, RUNNING, description)
    try:
        yield
    finally:
        setattr(manager, RUNNING, "")


def add_share(manager: TokenizerManager, task: asyncio.Task[None]) -> None:
    """Registers what reads the live weights until it ends."""
    shares: set[asyncio.Task[None]] = vars(manager).setdefault(_SHARES, set())
    shares.add(task)
    task.add_done_callback(shares.discard)


async def unshared(manager: TokenizerManager, timeout_s: float | None = None) -> bool:
    """Waits until no other engine reads the live weights. Returns False if one still does after `timeout_s`."""
    shares = set(getattr(manager, _SHARES, ()))
    return not shares or not (await asyncio.wait(shares, timeout=timeout_s))[1]


def clear(manager: TokenizerManager) -> None:
    setattr(manager, _LIVE, None)


def current(manager: TokenizerManager) -> WeightsInfo:
    torn_reason = torn_weights.reason(manager)
    now = WeightsInfo(
        version=str(sglang_versions.weight_version(manager) or ""),
        package_version=__version__,
        torn=torn_reason,
        under_way=bool(getattr(manager, RUNNING, "")),
        paused=bool(manager.is_pause),
        data_parallel_ranks=manager.server_args.dp_size,
        publication=publication(manager),
    )
    live: tuple[DistributedUpdateWeightsReq, DistributedUpdateWeightsOutput] | None = getattr(manager, _LIVE, None)
    return now if live is None or torn_reason else _with(now, *live)


def _with(
    now: WeightsInfo, request: DistributedUpdateWeightsReq, output: DistributedUpdateWeightsOutput
) -> WeightsInfo:
    return msgspec.structs.replace(
        now,
        digest=output.digest,
        verified=request.verify,
        session=request.address.session,
        update=request.update,
        transport=output.transport,
        engine_ranks=len(output.ranks),
        layout=LayoutInfo(request.layout, len(request.trainer_hosts), output.tensors, output.source_bytes),
        kept=output.kept,
    )


Stock = Callable[..., Awaitable[Any]]


async def _around_write(stock: Stock, manager: TokenizerManager, *args: Any, **kwargs: Any) -> Any:
    """Clears the record before, as weights change while it runs, and after, as an update may have ended meanwhile."""
    clear(manager)  # from now on they are not shared with another engine
    await unshared(manager)
    try:
        return await stock(manager, *args, **kwargs)
    finally:
        clear(manager)


async def _around_release(stock: Stock, manager: TokenizerManager, *args: Any, **kwargs: Any) -> Any:
    tags = (args[0] if args else kwargs["obj"]).tags
    releases_weights = not tags or "weights" in tags  # no tags mean all
    if releases_weights:
        stock_weights.released(manager)
        return await _around_write(stock, manager, *args, **kwargs)
    return await stock(manager, *args, **kwargs)
