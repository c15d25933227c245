"""What differs between the versions of SGLang that the patches work with, each difference in one function.

Every function says which versions do it which way, and asks SGLang itself rather than its version number: builds from
source carry odd numbers. What it asks for is looked up anew at each call, all of them far from any hot path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

from packaging.version import InvalidVersion, Version

from sglang_reshard.errors import Unsupported
from sglang_reshard.observability.logs import get_logger

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = get_logger(__name__)
C = TypeVar("C", bound=type)

OLDEST, NEWEST = Version("0.5.12"), Version("0.5.23")  # the engine tests run on both


def check(version: str | None = None) -> None:
    """Raise Unsupported for an SGLang that is older than the oldest tested one; warn of one that is newer.

    A newer one may well work: whatever it has renamed of what we hook is found, by name, before the first update
    (`presence.py`). An older one lacks what nobody has written for it.
    """
    told = version or metadata.version("sglang")
    try:
        release = Version(Version(told).base_version)
    except InvalidVersion:
        release = Version("0")
    if release == Version("0") or release == Version("0.0.0"):
        logger.warning("SGLang %s does not say which release it is of; sglang-reshard is tested with %s", told, _RANGE)
    elif release < OLDEST:
        raise Unsupported(f"SGLang {told} is older than {OLDEST}; install one of {_RANGE}")
    elif release > NEWEST:
        logger.warning("SGLang %s is newer than what sglang-reshard is tested with, %s", told, _RANGE)


_RANGE = f"{OLDEST} to {NEWEST}"


def envelope(cls: C) -> C:
    """Class decorator of what is sent between SGLang's processes: a subclass of its `BaseReq`.

    Until 0.5.14 `BaseReq` is a dataclass, pickled. From 0.5.15 it is a msgspec struct, which needs no decorator, but
    has to be made known where SGLANG_USE_PICKLE_IPC=0 has structs sent as msgpack.
    """
    from sglang.srt.managers import io_struct

    if not hasattr(io_struct, "hook_custom_types"):
        dataclasses.dataclass(cls)  # it returns the class that it was given
        return cls
    io_struct.hook_custom_types(cls)
    return cls


# -- the tokenizer manager


def send(manager: TokenizerManager, message: Any) -> None:
    """To the schedulers. Until 0.5.14 by the socket, from 0.5.15 by a method that knows how structs are sent."""
    if hasattr(manager, "_dispatch_to_scheduler"):
        manager._dispatch_to_scheduler(message)
    else:
        manager.send_to_scheduler.send_pyobj(message)


def weight_version(manager: TokenizerManager) -> str | None:
    """What SGLang calls the weights now. Until 0.5.16 in its ServerArgs; from 0.5.17 those stay as they were."""
    if hasattr(manager, "config_value"):
        return manager.config_value("weight_version")
    return manager.server_args.weight_version


def forget_unsent(manager: TokenizerManager, request_ids: Iterable[str]) -> None:
    """Take requests that fail before they are sent off the manager's list, on which they would stay for ever.

    From 0.5.20 SGLang does so itself, and lets go of their LoRA adapters, if it finds them there.
    """
    if not hasattr(manager, "_release_req_states_on_failure"):
        for request_id in request_ids:
            manager.rid_to_state.pop(request_id, None)


# -- the scheduler


def offload_tags(scheduler: Scheduler) -> set[str]:
    """What release_memory_occupation has taken away. The scheduler's in 0.5.12, from 0.5.13 its weight updater's."""
    updater = getattr(scheduler, "weight_updater", scheduler)
    return updater.offload_tags


def session_is_open(scheduler: Scheduler) -> bool:
    """Between begin_weight_update and end_weight_update, which there are from 0.5.21."""
    return getattr(getattr(scheduler, "weight_updater", None), "_session", None) is not None


def record_weight_version(scheduler: Scheduler, version: str | None) -> None:
    """From 0.5.19 schedulers tell of each request from which version on its tokens are."""
    if version is not None and hasattr(scheduler, "record_weight_version_change"):
        scheduler.record_weight_version_change(new_version=version)


def batches(scheduler: Scheduler) -> list[Any]:
    """Those in flight. Until 0.5.15 the current one stays after it has run; from 0.5.16 it is for debugging only."""
    held = (scheduler.running_batch, scheduler.last_batch, getattr(scheduler, "cur_batch", None))
    return [batch for batch in held if batch is not None]


def owns_cache(request: Any) -> bool:
    """Whether a request has a part of the KV cache. Until 0.5.18 it knows itself, from 0.5.19 its `kv` does."""
    if hasattr(request, "kv"):
        return request.kv.holds_kv
    return request.req_pool_idx is not None
