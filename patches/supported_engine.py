"""Recognises engines that cannot be updated by the options they were started with."""

from __future__ import annotations

import functools
import os
from typing import Any

from sglang_reshard.observability.logs import get_logger

logger = get_logger(__name__)

_FALSE = ("", "0", "false", "no", "off")  # values of SGLang's environment variables


_ELSEWHERE = (
    "weights are kept elsewhere and fetched when they are used, where an update does not reach them; turn it off"
)
_OUTLASTS = "the cache of the old weights is kept where a flush does not reach it; turn it off"
# Options of which one value is like leaving them out, and what any other value means. Not all versions have all.
_REFUSED: dict[str, tuple[Any, str]] = {
    "use_ray": (False, "SGLang loads no plugins in schedulers that are Ray actors; start the engine without it"),
    "elastic_ep_backend": (None, "ranks join and leave while serving; start the engine without it"),
    "enable_elastic_expert_backup": (False, "its backup would keep the old experts; turn it off"),
    "weight_cache_mode": ("off", "the weights in memory are shared with other engines; turn it off"),
    "tokenizer_worker_num": (1, "SGLang loads no plugins in the extra workers; use 1"),
    "cpu_offload_gb": (0, _ELSEWHERE),
    "offload_group_size": (-1, _ELSEWHERE),
    "enable_paged_experts": (False, _ELSEWHERE),
    "ple_offload_embedding": (None, _ELSEWHERE),
    "kt_weight_path": (None, _ELSEWHERE),
    "dwdp_size": (1, _ELSEWHERE),
    "dcp_replicate_q_proj": (
        False,
        "each rank gathers the query projections of all ranks when it starts, and decodes with these; turn it off",
    ),
    "torchao_config": (
        "",
        "weights are quantized after loading, which an update cannot redo; leave it out",
    ),
    "hicache_storage_backend": (None, _OUTLASTS),
    "enable_lmcache": (False, _OUTLASTS),
    "enable_flexkv": (False, _OUTLASTS),
    "enable_unified_cache_external_linker": (False, _OUTLASTS),
    "enable_mm_global_cache": (False, _OUTLASTS),
    "enable_prefix_mm_cache": (False, _OUTLASTS),
}


def unsupported_reason(server_args: Any) -> str:
    """Returns why an engine started with these options cannot be updated; empty if it can.

    server_args  SGLang's ServerArgs, of any version: an option that a version does not have counts as off
    """
    if server_args.pp_size > 1 and server_args.disaggregation_mode != "null":
        return (
            f"pp_size={server_args.pp_size} with disaggregation_mode={server_args.disaggregation_mode}: updates are "
            "not supported in SGLang's loops for these stages; use tensor parallelism for prefill and decode servers"
        )
    for option, (off, reason) in _REFUSED.items():
        value = getattr(server_args, option, off)
        if value and value != off:
            return f"{option}: {reason}" if value is True else f"{option}={value}: {reason}"
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() not in _FALSE:  # from 0.5.17
        return "SGLANG_RUST_SERVER: the Rust server cannot forward the requests of an update; unset it"
    return ""


def unreached(server_args: Any) -> str:
    """Returns which weights of other servers the engine's answers depend on; empty if on none."""
    if getattr(server_args, "language_only", False):
        return (
            "encoder servers compute the embeddings of images for this engine, and an update does not reach their "
            "weights: restart them on a checkpoint if the vision tower has changed"
        )
    return ""


def warn_if_unsupported(server_args: Any) -> None:
    """Logs at startup why updates would be refused, or which weights they do not reach. The engine may serve anyway."""
    if reason := unsupported_reason(server_args):
        _warn(f"This engine serves, but sglang-reshard cannot update its weights: {reason}")
    elif reason := unreached(server_args):
        _warn(f"This engine can be updated, but only in part: {reason}")


@functools.cache
def _warn(message: str) -> None:
    logger.warning(message)
