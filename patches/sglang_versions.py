"""Handles the differences between the supported SGLang versions, each in one function.

Every function documents which versions behave which way, and inspects SGLang itself rather than its version number:
builds from source have arbitrary ones. It does so at each call, all of them far from any hot path.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from packaging.version import InvalidVersion, Version

from sglang_reshard.errors import Unsupported
from sglang_reshard.observability.logs import get_logger

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = get_logger(__name__)
C = TypeVar("C", bound=type)

OLDEST, NEWEST = Version("0.5.12"), Version("0.5.23")  # the engine tests run on both
_RANGE = f"{OLDEST} to {NEWEST}"


def check(version: str | None = None) -> None:
    """Raises Unsupported for an SGLang older than the oldest tested version; warns about one that is newer.

    A newer one may well work: a hooked name that it has changed is reported before the first update (`hooks`). An
    older one lacks methods that this package relies on.
    """
    reported = version or metadata.version("sglang")
    try:
        release = Version(Version(reported).base_version)
    except InvalidVersion:
        release = Version("0")
    if release == Version("0"):  # 0.0.0 is equal
        logger.warning("SGLang %s is an unknown release; sglang-reshard is tested with %s", reported, _RANGE)
    elif release < OLDEST:
        raise Unsupported(f"SGLang {reported} is older than {OLDEST}; install a version of {_RANGE}")
    elif release > NEWEST:
        logger.warning("SGLang %s is newer than the versions sglang-reshard is tested with, %s", reported, _RANGE)


def ipc_message(cls: C) -> C:
    """Class decorator for messages between SGLang's processes, subclasses of its `BaseReq`.

    Until 0.5.14 `BaseReq` is a dataclass, pickled. From 0.5.15 it is a msgspec struct, which needs no decorator but has
    to be registered for SGLANG_USE_PICKLE_IPC=0, where structs are sent as msgpack.
    """
    from sglang.srt.managers import io_struct

    if not hasattr(io_struct, "hook_custom_types"):
        dataclasses.dataclass(cls)  # modifies the class in place
        return cls
    io_struct.hook_custom_types(cls)
    return cls


# -- the tokenizer manager


def send_to_schedulers(manager: TokenizerManager, message: Any) -> None:
    """Until 0.5.14 through the socket, from 0.5.15 by a method that serializes structs."""
    if hasattr(manager, "_dispatch_to_scheduler"):
        manager._dispatch_to_scheduler(message)
    else:
        manager.send_to_scheduler.send_pyobj(message)


def weight_version(manager: TokenizerManager) -> str | None:
    """Returns SGLang's current weight_version. Until 0.5.16 in its ServerArgs, which are immutable from 0.5.17 on."""
    if hasattr(manager, "config_value"):
        return manager.config_value("weight_version")
    return manager.server_args.weight_version


def drop_unsent_requests(manager: TokenizerManager, request_ids: Iterable[str]) -> None:
    """Unregisters requests that fail before they are sent, which would otherwise stay registered forever.

    From 0.5.20 SGLang does so itself, and releases their LoRA adapters if it finds the requests registered.
    """
    if not hasattr(manager, "_release_req_states_on_failure"):
        for request_id in request_ids:
            manager.rid_to_state.pop(request_id, None)


# -- the scheduler


def send_output(scheduler: Scheduler, output: Any, request: Any) -> None:
    """Answers a request. Only the ranks that talk to the tokenizer manager send. Its method's place has changed."""
    if hasattr(scheduler, "send_control_output"):
        scheduler.send_control_output(output, request)
    else:
        scheduler.send_to_tokenizer.send_output(output, request)


def offload_tags(scheduler: Scheduler) -> set[str]:
    """Returns what release_memory_occupation released. The scheduler's in 0.5.12, its weight updater's from 0.5.13."""
    updater = getattr(scheduler, "weight_updater", scheduler)
    return updater.offload_tags


def weight_update_session_open(scheduler: Scheduler) -> bool:
    """Returns True between begin_weight_update and end_weight_update, which exist from 0.5.21 on."""
    return getattr(getattr(scheduler, "weight_updater", None), "_session", None) is not None


def reports_token_versions(scheduler: Scheduler | type[Scheduler]) -> bool:
    """Returns whether schedulers report which version has computed each token of a request, as from 0.5.19 on."""
    return hasattr(scheduler, "record_weight_version_change")


def batches(scheduler: Scheduler) -> list[Any]:
    """Returns the batches in flight. Until 0.5.15 `cur_batch` may be finished; from 0.5.16 it is only for debugging."""
    found = (scheduler.running_batch, scheduler.last_batch, getattr(scheduler, "cur_batch", None))
    return [batch for batch in found if batch is not None]


def holds_kv_cache(request: Any) -> bool:
    """Returns whether a request holds KV cache. Until 0.5.18 `req_pool_idx` tells, from 0.5.19 `kv`, which is None in
    earlier releases for a request that holds none.
    """
    if hasattr(request, "req_pool_idx"):
        return request.req_pool_idx is not None
    return request.kv.holds_kv


def clear_embedding_cache() -> None:
    """Empties this rank's cache of images' embeddings, which SGLang's flush leaves. Its module was mm_utils first."""
    for name in ("mm_schedule", "mm_utils"):
        cache = getattr(sys.modules.get(f"sglang.srt.managers.{name}"), "embedding_cache", None)
        if cache is not None:
            cache.clear()


def draft_runners(worker: Any) -> list[ModelRunner]:
    """Returns the model runners of a draft worker; none for kinds that have them elsewhere.

    Workers of the first generation, which end with 0.5.16 or so, are TP workers themselves; later ones have a draft
    worker that runs one model or, in a list, one per layer. From 0.5.19 it lists them either way.
    """
    drafts = getattr(worker, "draft_worker", worker)
    for attribute in ("draft_runners", "draft_runner_list", "model_runner_list"):
        if found := getattr(drafts, attribute, None):
            return list(found)
    runner = getattr(drafts, "draft_runner", None) or getattr(drafts, "model_runner", None)
    return [] if runner is None else [runner]


def hot_tokens(worker: Any) -> torch.Tensor | None:
    """Returns the tokens that the models of a draft worker propose, int64; None if they propose all."""
    tokens: torch.Tensor | None = getattr(getattr(worker, "draft_worker", worker), "hot_token_id", None)
    return tokens


def fused_keys_and_values(worker: Any) -> Any:
    """Returns the `FusedKVMaterializeHelper` of a DFLASH draft worker, which it has on GPUs; None of other workers."""
    return getattr(worker, "_fused_kv_helper", None)


# -- the model runner


def engine_rank(runner: ModelRunner) -> tuple[int, int]:
    """Returns this engine rank, and the number of engine ranks.

        rank = (data parallel rank * pipeline stages + stage) * tensor parallel size + tensor parallel rank

    With dp-attention the data parallel ranks are tensor parallel ranks too, and count once. The data parallel rank that
    the controller gave this process was the model runner's until it moved.
    """
    # SGLang's world is one data parallel rank's.
    arguments, rank, size = runner.server_args, dist.get_rank(), dist.get_world_size()
    if arguments.dp_size == 1 or arguments.enable_dp_attention:
        return rank, size
    if hasattr(runner, "dp_rank"):
        replica = runner.dp_rank or 0
    else:
        from sglang.srt.runtime_context import get_parallel

        replica = get_parallel().dp_rank or 0
    return replica * size + rank, arguments.dp_size * size


def holds_graphs(runner: ModelRunner) -> bool:
    """Returns whether CUDA graphs hold addresses. Until 0.5.14 or so one runner has all graphs, then one each kind."""
    names = ("graph_runner", "piecewise_cuda_graph_runner", "decode_cuda_graph_runner", "prefill_cuda_graph_runner")
    return any(getattr(runner, name, None) is not None for name in names)


def online_updates_refused(model: torch.nn.Module) -> str:
    """Returns why SGLang refuses its own online updates of a model; empty if it does not.

    From 0.5.17 on it knows caches of weights that an update leaves as they are. Modules declare some by an attribute.
    """
    for name, module in model.named_modules():
        if reason := getattr(module, "_derived_weight_cache_error", None):
            return f"{name or type(module).__name__}: {reason}"
    updater = sys.modules.get("sglang.srt.model_executor.model_runner_components.weight_updater")
    known = getattr(updater, "_unsupported_derived_weight_cache_error", None)
    if known is None:
        return ""
    asked_of = (model,) if inspect.signature(known).parameters else ()  # 0.5.17 judges options alone
    return known(*asked_of) or ""
