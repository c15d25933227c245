"""Plans and keeps the transfer from trainer ranks to one engine rank: the route's end, and the landing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_reshard.engine.context import UpdateContext
from sglang_reshard.engine.targets import TargetPlan
from sglang_reshard.engine.trainer_memory import TrainerMemory
from sglang_reshard.engine.unread import check_unread, unread_remark
from sglang_reshard.landings.base import Landing
from sglang_reshard.landings.choice import Landings
from sglang_reshard.plan import ClusterTopology, RankDemand
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, Prepare
from sglang_reshard.routes import choose_strategy, engine_end
from sglang_reshard.routes.base import EngineEnd, EngineSide, Kept, Meeting, Reads
from sglang_reshard.routes.strategy import Strategy


@dataclass(slots=True)
class Prepared:
    """The transfer to one engine rank, for one target plan, one set of handles and one set of options.

    request    that it was prepared for
    end        of the route; it is connected once all engine ranks have planned alike
    command    to the trainer ranks, if they have to prepare
    landing    where the weights arrive
    remark     on the plan, for the trainer's report
    kept       names of the parameters that any engine rank leaves as they are
    """

    target: TargetPlan
    request: DistributedUpdateWeightsReq
    strategy: Strategy
    end: EngineEnd
    command: Prepare | None
    landing: Landing
    remark: str
    kept: tuple[str, ...]

    def is_current(self, request: DistributedUpdateWeightsReq, target: TargetPlan) -> bool:
        """Returns True if nothing has changed for `request`, and the trainer ranks that send are still prepared."""
        prepared = self.command is None or self.command.transfer == request.prepared
        unchanged = _options(self.request) == _options(request)
        return self.target is target and unchanged and prepared and self.end.serves(request)

    @property
    def held_bytes(self) -> int:
        """Bytes of buffers that are kept between updates."""
        return self.end.nbytes + self.target.program.scratch_bytes + self.landing.nbytes


class Transfers:
    """Prepares one engine rank's transfers. Keeps the last one, mapped memory, and the state of landings."""

    def __init__(self, device: torch.device, live: bool) -> None:
        """`live`: see `Target`."""
        self._device = device
        self._landings = Landings(device, live)
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
        self._landings.drop()
        self.trainer_memory.unmap()

    def clear(self) -> None:
        """Drops all that depends on other ranks."""
        self.unmap()
        for kept in self._kept_by_routes.values():
            kept.close()
        self.trainer_memory.clear()

    def release_pages(self) -> None:
        """Drops what holds pages of the live weights, which are about to be released."""
        if self.last is not None and self.last.end.holds_pages:
            self.drop_last()
        for kept in self._kept_by_routes.values():
            kept.release_pages()

    def failed(self, request: DistributedUpdateWeightsReq) -> None:
        """Lets routes know of an update that has failed."""
        for kept in self._kept_by_routes.values():
            kept.failed(request)

    def abort(self) -> None:
        """Ends this rank's waits for other ranks. Called from another thread."""
        last = self.last
        if last is not None:
            last.end.abort()

    def plan(self, context: UpdateContext, demands: Sequence[RankDemand], target: TargetPlan) -> Prepared:
        """Chooses the route, maps the memory that this rank reads, and makes the route's end.

        Raises Mismatch for names that no engine rank reads, and Unsupported for an infeasible transport or
        insufficient memory.
        """
        request, remark = context.request, target.names.remark
        if unread := target.unread(demands):
            check_unread(unread, request.ignore, request.apart)
            remark = "; ".join(filter(None, (unread_remark(unread), remark)))
        topology = ClusterTopology.of(demands, request.trainer_hosts, request.trainer_devices)
        index = target.tensor_index
        strategy = choose_strategy(request.transport, index, demands, topology, request.bucket_bytes)
        mapped = strategy.mapped_by(context.rank, target.read_plan, index)
        memory = self.trainer_memory.map(mapped, context, index.layout)
        ranks_on_host = sum(demand.host == demands[context.rank].host for demand in demands)
        checked = request.verify != "off" and not strategy.compares
        landing = self._landings.make(context, target, ranks_on_host, checked=checked)
        side = EngineSide(
            reads=Reads(context.rank, self._device, index, target.read_plan, landing, memory, request.timeout_s),
            request=request,
            live=target.program,
            read_plans=tuple(demand.digest for demand in demands),
            transfer=f"{request.update}/{strategy.digest()}",
            kept=self._kept_by_routes,
        )
        end = engine_end(side, strategy)
        self.last = Prepared(target, request, strategy, end, end.ask(context.session), landing, remark, ())
        return self.last

    def connect(self, context: UpdateContext) -> None:
        """Connects what was planned. Collective over engine ranks and the trainer ranks that prepare."""
        assert self.last is not None
        scope, update = context.channel.scope, context.request.update
        self.last.landing.connect(context.all_gather, self.last.kept)
        self.last.end.connect(Meeting(context.session, scope, update, context.all_gather, self.last.kept))


def _options(request: DistributedUpdateWeightsReq) -> tuple[object, ...]:
    """Returns what must be equal for a prepared transfer to be used again; its end compares what routes are asked."""
    chosen = request.bucket_bytes, request.transport, request.staged, request.verify != "off", tuple(request.around)
    return request.handles, chosen, request.ignore, request.apart
