"""Layout x copies -> who moves which box to whom. Pure functions; nothing here touches a tensor.

catalog    a layout's tensors by kind, and its pieces
intake     what one engine rank takes in: exact boxes, from whom, landing where
needs      what engine ranks tell each other of it
broadcast  groups and rounds, where whole pieces are broadcast
streams    messages, where exact boxes are sent
cost       what each way would take
choice     the way that an update goes, and why
"""

from sglang_reshard.plan.broadcast import BroadcastPlan, Lane, Round, plan_broadcast
from sglang_reshard.plan.catalog import Catalog
from sglang_reshard.plan.choice import Choice, check_transport, choose
from sglang_reshard.plan.cost import Setting
from sglang_reshard.plan.intake import Intake, Seat, intake
from sglang_reshard.plan.needs import Needs, needs_of, unneeded

__all__ = [
    "BroadcastPlan",
    "Catalog",
    "Choice",
    "Intake",
    "Lane",
    "Needs",
    "Round",
    "Seat",
    "Setting",
    "check_transport",
    "choose",
    "intake",
    "needs_of",
    "plan_broadcast",
    "unneeded",
]
