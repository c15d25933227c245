"""sglang.srt.managers.schedule_batch: keeps the prefix caches of weight versions apart.

    cache_versions.begin(scheduler)    # new weights are live

After an update with flush_cache="by_version" a request that holds no KV cache yet gets a mark before SGLang's
`extra_key`, the namespace of a request in the radix cache. It reads and extends only what new weights have computed.
Requests that hold cache, which a pause in place leaves, go on with it, and leave it under the mark that they began
with. Nobody reads that again, so SGLang evicts it first, as least recently used.

A client chooses the rest of its `extra_key`. A key that begins like a mark gets the mark of the version, also before
the first such update, so a key that begins like a mark always begins with one of this module.

Every engine rank marks alike: an update reaches all schedulers of an engine between the same two requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_reshard.patches import sglang_versions

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

_MARK = "_reshard_cache_version"  # on a request: the mark that its `extra_key` begins with
_BEGIN = "weights "  # of every mark
_version = 0  # of this scheduler's process


def refusal(scheduler: Scheduler) -> str:
    """Returns why this scheduler's cache cannot be kept apart by version; empty if it can."""
    args = scheduler.server_args
    if args.pp_size > 1:
        why = f"pp_size={args.pp_size}: pipeline stages admit a request at different times"
    elif args.disaggregation_mode != "null":
        why = f"disaggregation_mode={args.disaggregation_mode}: the cache of a request comes from another server"
    elif getattr(args, "enable_streaming_session", False):
        why = "enable_streaming_session: a session keeps its cache outside of the radix cache"
    elif type(scheduler.tree_cache).__name__ == "RadixCacheCpp":
        why = "SGLang's radix cache in C++ does not keep requests with different keys apart"
    else:
        return ""
    return f"flush_cache='by_version' is not supported with {why}; flush the cache"


def begin(scheduler: Scheduler) -> None:
    """Requests that hold no cache now, and all later ones, are of a new version."""
    global _version
    _version += 1
    sglang_versions.clear_embedding_cache()


def mark(request: Req, *_: Any, **__: Any) -> None:
    if sglang_versions.holds_kv_cache(request):
        return
    before, now = vars(request).get(_MARK, ""), f"{_BEGIN}{_version}|"
    key = (request.extra_key or "").removeprefix(before)
    if before != now and (_version or key.startswith(_BEGIN)):
        request.extra_key = now + key
        setattr(request, _MARK, now)
