"""What an engine rank has to be filled with: its traced loader, and the exact boxes that it takes in."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan import RankDemand, RankLocation, ReadPlan, TensorIndex, plan_reads, rank_demand
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.validation import check_layout
from sglang_reshard.trace import Program, trace
from sglang_reshard.transports.memory import host_identity


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """Good for one source layout (by content hash), one set of live addresses and one set of trainer hosts."""

    layout: str
    signature: int | str
    trainer_hosts: tuple[str, ...]
    catalog: TensorIndex
    program: Program
    intake: ReadPlan
    needs: RankDemand

    def serves(self, request: DistributedUpdateWeightsReq, signature: int | str) -> bool:
        return self._is_traced(request, signature) and self.trainer_hosts == request.trainer_hosts

    def _is_traced(self, request: DistributedUpdateWeightsReq, signature: int | str) -> bool:
        return (self.layout, self.signature) == (request.layout, signature)

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        signature: int | str,
        request: DistributedUpdateWeightsReq,
        session: Session,
        place: tuple[int, int],
        known: TargetPlan | None,
    ) -> TargetPlan:
        """Trace and plan for the engine rank at `place` (its rank, and how many there are).

        known  an earlier target; a trainer that came back on other hosts with the same tensors needs no new trace
        """
        if known is not None and known._is_traced(request, signature):
            catalog, program = known.catalog, known.program
        else:
            layout = session.get_layout(request.layout, SourceLayout, request.timeout_s)
            check_layout(layout, len(request.trainer_hosts))
            program = trace(model, [t.spec for t in layout.tensors])
            catalog = TensorIndex.of(layout)
        host = host_identity()
        taken = plan_reads(catalog, program.copies, RankLocation(*place, host, request.trainer_hosts))
        needs = rank_demand(catalog, taken, host, len(os.sched_getaffinity(0)))
        return cls(request.layout, signature, request.trainer_hosts, catalog, program, taken, needs)
