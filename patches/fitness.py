"""Engines that cannot be updated, as far as the arguments tell that they were started with."""

from __future__ import annotations

from typing import Any


def unfit(server_args: Any) -> str:
    """Why an engine that was started like this cannot be updated; empty if it can."""
    if server_args.dp_size > 1 and not server_args.enable_dp_attention:
        return f"dp_size={server_args.dp_size} without dp-attention: run one engine per replica instead"
    if server_args.pp_size > 1:
        return f"pp_size={server_args.pp_size}: pipeline stages are not carried yet; use tensor parallelism"
    if getattr(server_args, "tokenizer_worker_num", 1) > 1:
        return "tokenizer_worker_num > 1: SGLang loads no plugins in the extra workers; use 1"
    if server_args.enable_eplb:
        return "enable_eplb: experts move between ranks while serving, which is not followed yet; turn it off"
    return ""
