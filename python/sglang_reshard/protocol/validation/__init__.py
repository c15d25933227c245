"""Validates what one process sends to another about tensors and memory, before it is used.

A message is authenticated, but its content may be wrong: a broken trainer must not crash the engine that reads its
memory, nor the other way round. `layout.decoders` decodes messages, with a bound on their size and under a
content hash. After these checks every index is within its table, every view within its memory, and all work is bounded:

    check_layout        engine ranks, before a trainer's layout is used
    check_handles       engine ranks, before a trainer rank's memory is mapped
    check_prepare       trainer ranks, before they make their end of a route
    check_request       an engine's tokenizer manager, and each engine rank, before an update begins
    check_pull_request, check_share_request, check_load_request, check_probe_summary
                        an engine's HTTP process, before it asks anybody
    check_shared_weights
                        an engine's HTTP process that pulls, before it joins the other's session

The route checks the messages between its own ends. All raise Mismatch. Manifests are checked when they are new, not in
every update.
"""

from sglang_reshard.protocol.validation.handles import check_handles
from sglang_reshard.protocol.validation.layouts import check_layout
from sglang_reshard.protocol.validation.requests import (
    MAX_UPDATE,
    check_load_request,
    check_prepare,
    check_probe_summary,
    check_pull_request,
    check_request,
    check_share_request,
    check_shared_weights,
    max_update_s,
)

__all__ = [
    "MAX_UPDATE",
    "check_handles",
    "check_layout",
    "check_load_request",
    "check_prepare",
    "check_probe_summary",
    "check_pull_request",
    "check_request",
    "check_share_request",
    "check_shared_weights",
    "max_update_s",
]
