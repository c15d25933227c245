"""sglang.srt.eplb.expert_location: the slot of each logical expert, which EPLB changes while the engine serves.

The loader asks for it, so a trace is of one placement. Rebalancing moves experts between forward passes, in place.
"""

from __future__ import annotations


def placement() -> bytes:
    """Returns the physical to logical map of all layers; empty if experts are in the order of the checkpoint."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    metadata = get_global_expert_location_metadata()
    return b"" if metadata is None else bytes(metadata.physical_to_logical_map_cpu.contiguous().numpy().tobytes())
