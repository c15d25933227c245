"""Plans who transfers which elements to whom, without touching a tensor.

In: a `SourceLayout` and each engine rank's copies, from its traced loader. Out: a `ReadPlan` per engine rank (*reads*:
the regions of trainer ranks' local tensors, and their destinations). An engine rank's *demand* is the summary of its
read plan that all ranks share.
"""

from sglang_reshard.plan.read_plan import RankDemand, RankLocation, ReadPlan, plan_reads, rank_demand, unread_tensors
from sglang_reshard.plan.tensor_index import TensorIndex
from sglang_reshard.plan.topology import ClusterTopology

__all__ = [
    "ClusterTopology",
    "RankDemand",
    "RankLocation",
    "ReadPlan",
    "TensorIndex",
    "plan_reads",
    "rank_demand",
    "unread_tensors",
]
