"""Recognises engines that cannot be updated by the options they were started with."""

from __future__ import annotations

import functools
import os
from typing import Any

from sglang_reshard.observability.logs import get_logger

logger = get_logger(__name__)

_FALSE = ("", "0", "false", "no", "off")  # values of SGLang's environment variables


def unsupported_reason(server_args: Any) -> str:
    """Returns why an engine started with these options cannot be updated; empty if it can.

    server_args  SGLang's ServerArgs, of any version: an option that a version does not have counts as off
    """
    if server_args.pp_size > 1 and server_args.disaggregation_mode != "null":
        return (
            f"pp_size={server_args.pp_size} with disaggregation_mode={server_args.disaggregation_mode}: SGLang runs "
            "these stages by other loops, which is not supported; use tensor parallelism for prefill and decode servers"
        )
    if getattr(server_args, "tokenizer_worker_num", 1) > 1:
        number = server_args.tokenizer_worker_num
        return f"tokenizer_worker_num={number}: SGLang loads no plugins in the extra workers; use 1"
    if getattr(server_args, "use_ray", False):
        return "use_ray: SGLang loads no plugins in schedulers that are Ray actors; start the engine without it"
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() not in _FALSE:  # from 0.5.17
        return "SGLANG_RUST_SERVER: the Rust server cannot forward the requests of an update; unset it"
    if server_args.enable_eplb:
        return "enable_eplb: experts move between ranks while serving, which is not supported; turn it off"
    if backend := getattr(server_args, "elastic_ep_backend", None):
        return f"elastic_ep_backend={backend}: ranks join and leave while serving; start the engine without it"
    if (cache := getattr(server_args, "weight_cache_mode", "off")) != "off":  # from 0.5.17
        return f"weight_cache_mode={cache}: the weights in memory are shared with other engines; turn it off"
    return ""


def warn_if_unsupported(server_args: Any) -> None:
    """Logs at startup why the first update would be refused. The engine may still serve without updates."""
    if reason := unsupported_reason(server_args):
        _warn(reason)


@functools.cache
def _warn(reason: str) -> None:
    logger.warning("This engine serves, but sglang-reshard cannot update its weights: %s", reason)
