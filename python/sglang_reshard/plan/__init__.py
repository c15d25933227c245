"""Layout x copies -> who moves which box to whom. Pure functions; nothing here touches a tensor.

catalog    a layout's tensors by kind, and its pieces
intake     what one engine rank takes in: exact boxes, from whom, landing where
needs      what engine ranks tell each other of it
broadcast  groups and rounds, where whole pieces are broadcast
streams    messages, where exact boxes are sent
cost       what each way would take
choice     the way that an update goes, and why
"""

from sglang_reshard.plan.broadcast import BroadcastGroup, BroadcastPlan, Bucket, plan_broadcast
from sglang_reshard.plan.cost import ClusterTopology
from sglang_reshard.plan.demand import RankDemand, rank_demand, unread_tensors
from sglang_reshard.plan.read_plan import RankLocation, ReadPlan, plan_reads
from sglang_reshard.plan.strategy import Strategy, check_transport, choose_strategy
from sglang_reshard.plan.tensor_index import TensorIndex

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
