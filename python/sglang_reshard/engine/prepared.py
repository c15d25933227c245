"""Plans and keeps the transfer from trainer ranks to one engine rank: the route's end, and where it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_reshard.engine.target_planning import TargetPlan
from sglang_reshard.engine.trainer_memory import TrainerMemory
from sglang_reshard.engine.unread import check_unread, unread_remark
from sglang_reshard.landings.arrivals import ArrivalMemory
from sglang_reshard.landings.checked.engine import EngineChecks
from sglang_reshard.landings.shadow import ShadowWeights, check_room, shadow_bytes
from sglang_reshard.plan import ClusterTopology, RankDemand
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, Prepare, encode
from sglang_reshard.protocol.session import Session
from sglang_reshard.routes import engine_end
from sglang_reshard.routes.base import EngineEnd, EngineSide, Kept, Meeting, Reads
from sglang_reshard.routes.choice import choose_strategy
from sglang_reshard.routes.strategy import Strategy


@dataclass(slots=True)
class Prepared:
    """The transfer to one engine rank, for one target plan, one set of handles and one set of options.

    request    by which it was prepared
    end        of the route; it is connected once all engine ranks have planned alike
    command    to the trainer ranks, if they have to prepare
    shadow     where it writes, unless it writes to the live weights
    arrivals   its memory for what is converted on arrival
    checks     of this rank's weights, if they are verified
    remark     on the plan, for the trainer's report
    kept       names of the parameters that any engine rank leaves as they are
    """

    target: TargetPlan
    request: DistributedUpdateWeightsReq
    strategy: Strategy
    end: EngineEnd
    command: Prepare | None
    shadow: ShadowWeights | None
    arrivals: ArrivalMemory
    checks: EngineChecks | None
    remark: str
    kept: tuple[str, ...]

    def is_current(self, request: DistributedUpdateWeightsReq, target: TargetPlan) -> bool:
        """Returns True if nothing has changed for `request`, and the trainer ranks that send are still prepared."""
        command = self.command
        prepared = command is None or all(transfer == command.transfer for transfer in request.prepared)
        unchanged = _options(self.request) == _options(request)
        return self.target is target and unchanged and prepared and self.end.serves(request)

    def is_checked(self, request: DistributedUpdateWeightsReq) -> bool:
        """Returns True if `request` comes from the same version of the package and names the same transport."""
        known = self.request
        return (known.package_version, known.transport) == (request.package_version, request.transport)

    @property
    def held_bytes(self) -> int:
        """Bytes of buffers that are kept between updates."""
        return self.end.nbytes + self.target.program.scratch_bytes + self.arrivals.nbytes + self.shadow_bytes

    @property
    def shadow_bytes(self) -> int:
        return self.shadow.nbytes if self.shadow is not None else 0


class Transfers:
    """Prepares one engine rank's transfers. Keeps the last one, mapped memory and shadow weights."""

    def __init__(self, engine_rank: int, device: torch.device, live: bool = True) -> None:
        """`live` is false if requests are not served from the memory that is written: it needs no shadow."""
        self._rank, self._device, self._live = engine_rank, device, live
        self._shadow: ShadowWeights | None = None
        self._kept_by_routes: dict[str, Kept] = {}
        self.trainer_memory = TrainerMemory(device)
        self.last: Prepared | None = None

    def drop_last(self) -> None:
        """Drops the last transfer, with its connections, views and buffers."""
        last, self.last = self.last, None
        if last is not None:
            last.end.close()

    def unmap(self) -> None:
        """Unmaps the trainer ranks' memory, and drops all that has views of it."""
        self.drop_last()
        self._shadow = None
        self.trainer_memory.unmap()

    def clear(self) -> None:
        """Drops all that depends on other ranks."""
        self.unmap()
        for kept in self._kept_by_routes.values():
            kept.close()
        self.trainer_memory.clear()

    def failed(self, request: DistributedUpdateWeightsReq) -> None:
        """Lets routes know of an update that has failed."""
        for kept in self._kept_by_routes.values():
            kept.failed(request)

    def abort(self) -> None:
        """Ends this rank's waits for other ranks. Called from another thread."""
        last = self.last
        if last is not None:
            last.end.abort()

    def plan(
        self, request: DistributedUpdateWeightsReq, demands: Sequence[RankDemand], session: Session, target: TargetPlan
    ) -> Prepared:
        """Chooses the route, maps the memory that this rank reads, and makes the route's end.

        Raises Mismatch for names that no engine rank reads, and Unsupported for an infeasible transport or
        insufficient memory.
        """
        unread = target.unread(demands)
        check_unread(unread, request.ignore, request.apart)
        topology = ClusterTopology.of(demands, request.trainer_hosts, request.trainer_devices)
        index = target.tensor_index
        strategy = choose_strategy(request.transport, index, demands, topology, request.bucket_bytes)
        trainer_ranks = strategy.mapped_by(self._rank, target.read_plan, index)
        memory = self.trainer_memory.map(trainer_ranks, request, session, index.layout)
        self._allocate_shadow(request, demands, target)
        program = self._shadow.program if self._shadow is not None else target.program
        checks = None
        if request.verify != "off":
            checks = EngineChecks(index, program, session, target.names.names)
        observer = checks.checksums if checks is not None else None
        arrivals = ArrivalMemory(program, self._device, request.bucket_bytes, observer)
        side = EngineSide(
            reads=Reads(self._rank, self._device, index, target.read_plan, arrivals, memory, request.timeout_s),
            live=target.program,
            engine=request.engine,
            read_plans=tuple(demand.digest for demand in demands),
            trainer_ranks=len(request.trainer_hosts),
            bucket_bytes=request.bucket_bytes,
            transfer=f"{request.update}/{strategy.digest()}",
            options=request.around,
            kept=self._kept_by_routes,
        )
        end = engine_end(side, strategy)
        asked = end.ask(session)
        command = None
        if asked is not None:
            command = Prepare(side.transfer, asked.route, encode(asked.message), request.timeout_s)
        remark = "; ".join(filter(None, (unread_remark(unread), target.names.remark)))
        self.last = Prepared(target, request, strategy, end, command, self._shadow, arrivals, checks, remark, ())
        return self.last

    def connect(self, session: Session, scope: str, gather: Callable[[str, Any], list[Any]]) -> None:
        """Connects what was planned. Collective over engine ranks and the trainer ranks that prepare.

        scope, gather  see `Meeting`
        """
        assert self.last is not None
        self.last.end.connect(Meeting(session, scope, self.last.request.update, gather))

    def _allocate_shadow(
        self, request: DistributedUpdateWeightsReq, demands: Sequence[RankDemand], target: TargetPlan
    ) -> None:
        """Allocates the shadow weights of a staged update, unless they are there; frees those of another."""
        shadow = self._shadow
        if not request.staged:
            self._shadow = None
        elif shadow is None or shadow.live is not target.program:
            self._shadow = shadow = None  # so that its memory counts as free
            if not self._live:
                self._shadow = ShadowWeights.in_place(target.program)
                return
            ranks_on_host = sum(demand.host == demands[self._rank].host for demand in demands)
            check_room(shadow_bytes(target.program), ranks_on_host, self._device)
            self._shadow = ShadowWeights.of(target.program)


def _options(request: DistributedUpdateWeightsReq) -> tuple[object, ...]:
    """Returns what must be equal for a prepared transfer to be used again; its end compares what routes are asked."""
    chosen = request.bucket_bytes, request.transport, request.staged, request.verify != "off", tuple(request.around)
    return request.handles, chosen, request.ignore, request.apart
