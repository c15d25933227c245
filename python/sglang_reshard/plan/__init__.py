"""Plans who transfers which elements to whom, without touching a tensor.

In: a `SourceLayout` and each engine rank's copies, from its traced loader. Out: a `ReadPlan` per engine rank (*reads*:
which region of which trainer rank's local tensor goes where) and one `Strategy` for all. An engine rank's *demand* is
the summary of its read plan that all ranks share. A *bucket* is a buffer of bounded size; in every *round* each peer
sends one message.
"""

from sglang_reshard.plan.broadcast import BroadcastGroup, BroadcastPlan, Bucket, plan_broadcast
from sglang_reshard.plan.choice import Strategy, check_transport, choose_strategy
from sglang_reshard.plan.read_plan import RankDemand, RankLocation, ReadPlan, plan_reads, rank_demand, unread_tensors
from sglang_reshard.plan.tensor_index import TensorIndex
from sglang_reshard.plan.topology import ClusterTopology

__all__ = [
    "BroadcastGroup",
    "BroadcastPlan",
    "Bucket",
    "ClusterTopology",
    "RankDemand",
    "RankLocation",
    "ReadPlan",
    "Strategy",
    "TensorIndex",
    "check_transport",
    "choose_strategy",
    "plan_broadcast",
    "plan_reads",
    "rank_demand",
    "unread_tensors",
]
