"""Moves parameters from one torch layout to another, between ranks of one process group: parameter reallocation.

`ReshardPlan.make` plans and prepares, once; `ReshardPlan.run` moves, as often as wanted. The source's layout, the plan
and the messages are those of an update; in place of an engine's loader, the target's own shards say what a rank needs.
"""

from sglang_reshard.extras.realloc.plan import ReshardPlan, reshard

__all__ = ["ReshardPlan", "reshard"]
