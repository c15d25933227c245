"""SGLang's state of this process, which newer versions keep elsewhere."""

from __future__ import annotations

from typing import Any


def published_arguments() -> Any:
    """Returns the ServerArgs that this process has published."""
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:
        from sglang.srt.server_args import get_global_server_args as get_server_args
    return get_server_args()


def place_experts(metadata: Any) -> None:
    """Makes this the location of experts that layers ask for, in place of the one before."""
    from sglang.srt.eplb import expert_location

    if "_global_expert_location_metadata" in vars(expert_location):
        vars(expert_location)["_global_expert_location_metadata"] = metadata
    else:
        expert_location.set_global_expert_location_metadata(metadata, allow_overwrite=True)
