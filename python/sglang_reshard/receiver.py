"""What a ModelRunner runs: an update as one engine rank lives it.

Between the phases all engine ranks exchange verdicts, so that they go on or stop together:

    look     alone: has anything changed? If so: fetch the layout, trace the loader, list what is lacking
    plan     all needs are known: plan, map the trainer ranks' memory, check what can be checked
    connect  make groups and views
    move     bytes into the live parameters, then the loader's local steps

Up to `connect` nothing has been written. A failure after that leaves the rank torn until an update
succeeds. An update for which nothing has changed goes from `look` straight to `move`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch

from sglang_reshard.control import Control
from sglang_reshard.errors import ReshardError
from sglang_reshard.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.peak_memory import PeakMemory
from sglang_reshard.plan import Needs, Pieces, Plan, needs_of, unneeded
from sglang_reshard.report import RankReport
from sglang_reshard.session import Address, Session
from sglang_reshard.sources.placements import Layout
from sglang_reshard.trace import Program, live_signature, trace
from sglang_reshard.transports.base import Here, Transport
from sglang_reshard.transports.choice import chosen
from sglang_reshard.transports.groups import Groups
from sglang_reshard.transports.memory import Handles, PeerMemory, host_identity
from sglang_reshard.unused_names import check_used, remark
from sglang_reshard.version import check_same_version

T = TypeVar("T")
logger = logging.getLogger(__name__)


class _Looked(msgspec.Struct, frozen=True):
    """A rank's verdict on `look`.

    current  its plan still stands
    grouped  it has the groups of this session; when some rank has not, all make them anew
    needs    what it lacks
    """

    error: str = ""
    current: bool = False
    grouped: bool = False
    needs: Needs | None = None


class _Verdict(msgspec.Struct, frozen=True):
    error: str = ""
    plan: str = ""


class _Moved(msgspec.Struct, frozen=True):
    error: str = ""
    report: RankReport | None = None
    read_bytes: dict[int, int] = {}


@dataclass(frozen=True, slots=True)
class _Target:
    """The traced loader, good for one layout and one set of live addresses."""

    layout: str
    signature: int | str
    pieces: Pieces
    program: Program
    needs: Needs


@dataclass(frozen=True, slots=True)
class _Route:
    """A transport ready to move, good for one target, one set of handles and one bucket size.

    kind, why  the transport's name, and the reason for it
    remark     what the trainer should know about the plan
    """

    target: _Target
    handles: tuple[str, ...]
    bucket_bytes: int
    kind: str
    why: str
    transport: Transport
    remark: str

    @property
    def held_bytes(self) -> int:
        """Bytes of buffers that stay between updates."""
        return self.transport.extra_bytes + self.target.program.scratch_bytes


class WeightReceiver:
    """Keeps what can be reused between updates: session, traced loader, mapped memory, groups, views."""

    def __init__(self, model: torch.nn.Module, control: Control, device: torch.device) -> None:
        self._model, self._control, self._device = model, control, device
        self._session: Session | None = None
        self._groups: Groups | None = None
        self._target: _Target | None = None
        self._memory: dict[int, tuple[str, PeerMemory]] = {}
        self._route: _Route | None = None
        self.torn = ""  # why the weights are partly written, while they are

    def update(self, request: DistributedUpdateWeightsReq, refusal: str = "") -> DistributedUpdateWeightsOutput:
        """Bring the live parameters to the trainer's weights. All engine ranks call it together.

        refusal  why this rank must not be updated now, as its surroundings know it; the others are told

        Never raises for a failed update: every rank returns the same refusal instead.
        """
        try:
            return self._update(request, refusal)
        except ReshardError as error:  # the verdicts themselves could not be exchanged
            self._forget()
            return DistributedUpdateWeightsOutput(success=False, message=str(error), torn=bool(self.torn))

    def _update(self, request: DistributedUpdateWeightsReq, refusal: str) -> DistributedUpdateWeightsOutput:
        clock = _Clock()
        meter = PeakMemory(self._device)
        looked, error = (None, refusal) if refusal else _attempt(lambda: self._look(request, clock))
        opening = looked or _Looked(error=error)
        openings = self._control.gather(opening, request.timeout_s)
        if refused := self._refused("prepare", [o.error for o in openings]):
            return refused
        kept_bytes = 0
        if all(o.current for o in openings):
            assert self._route is not None
            kept_bytes = self._route.held_bytes
        else:
            if not all(o.grouped for o in openings):
                self._groups = None
            needs = [o.needs for o in openings if o.needs is not None]
            if refused := self._prepare(request, needs, clock):
                return refused
        return self._move(request, clock, meter, kept_bytes)

    def _look(self, request: DistributedUpdateWeightsReq, clock: _Clock) -> _Looked:
        check_same_version(request.package_version)
        chosen(request.transport)
        session = self._join(request)
        signature = live_signature(self._model)
        target = self._target
        if target is None or (target.layout, target.signature) != (request.layout, signature):
            with clock("trace"):
                layout = session.get_layout(request.layout, Layout, request.timeout_s)
                program = trace(self._model, [t.spec for t in layout.tensors])
                pieces = Pieces.of(layout)
                needs = needs_of(pieces, program.copies, host_identity())
                target = _Target(request.layout, signature, pieces, program, needs)
        self._target = target
        route = self._route
        current = (
            route is not None
            and route.target is target
            and (route.handles, route.bucket_bytes) == (request.handles, request.bucket_bytes)
        )
        return _Looked(current=current, grouped=self._groups is not None, needs=target.needs)

    def _join(self, request: DistributedUpdateWeightsReq) -> Session:
        address = Address(request.session, request.store_host, request.store_port)
        if self._session is None or self._session.address != address:
            self._forget()
            self._session = Session.join(address, request.timeout_s)
        return self._session

    def _forget(self) -> None:
        """Drop all that was agreed with others; the next update starts from a new connection."""
        self._session = self._groups = self._route = None
        self._memory = {}

    def _prepare(
        self, request: DistributedUpdateWeightsReq, needs: Sequence[Needs], clock: _Clock
    ) -> DistributedUpdateWeightsOutput | None:
        """Plan and connect, after a `look` that succeeded on all ranks; the refusal if that fails on any."""
        session, target = self._session, self._target
        assert session is not None
        assert target is not None
        self._route = None
        # By the number of this update all ranks find each other, and none what a broken group left behind.
        groups = self._groups = self._groups or Groups(
            session.store, self._control.rank, self._device, request.timeout_s, epoch=request.update
        )
        with clock("plan"):
            planned, error = _attempt(lambda: self._plan(request, needs, session, target))
            digest = planned[0].digest() if planned else ""
            verdicts = self._control.gather(_Verdict(error, digest), request.timeout_s)
        if refused := self._refused("plan", [v.error for v in verdicts]):
            return refused
        if planned is None or len({v.plan for v in verdicts}) > 1:
            return self._refused("plan", ["engine ranks made different plans; this is a bug, please report it"])
        with clock("connect"):
            route, error = _attempt(lambda: self._connect(request, *planned, groups, target))
            verdicts = self._control.gather(_Verdict(error), request.timeout_s)
        if refused := self._refused("connect", [v.error for v in verdicts]):
            self._forget()  # a group that was made by some of its members only cannot be used
            return refused
        self._route = route
        return None

    def _plan(
        self, request: DistributedUpdateWeightsReq, needs: Sequence[Needs], session: Session, target: _Target
    ) -> tuple[Plan, str]:
        """The plan, with the memory that this rank reads mapped, and what the trainer should know about it."""
        unused = unneeded(target.pieces, needs)
        check_used(unused, request.ignore)
        kind, _ = chosen(request.transport)
        plan = kind.plan(target.pieces, needs, request.trainer_hosts, request.bucket_bytes)
        memory = {}
        for trainer_rank in plan.trainer_ranks_read_by(self._control.rank):
            digest = request.handles[trainer_rank]
            known = self._memory.get(trainer_rank)
            if known is None or known[0] != digest:
                handles = session.get_handles(trainer_rank, digest, Handles, request.timeout_s)
                known = (digest, PeerMemory(trainer_rank, handles))
            memory[trainer_rank] = known
        self._memory = memory  # what is no longer read is unmapped
        return plan, remark(unused)

    def _connect(
        self, request: DistributedUpdateWeightsReq, plan: Plan, told: str, groups: Groups, target: _Target
    ) -> _Route:
        memory = {rank: peer for rank, (_, peer) in self._memory.items()}
        here = Here(self._control.rank, self._device, target.pieces, plan, target.program, memory, groups)
        kind, why = chosen(request.transport)
        return _Route(target, request.handles, request.bucket_bytes, kind.name, why, kind.build(here), told)

    def _move(
        self, request: DistributedUpdateWeightsReq, clock: _Clock, meter: PeakMemory, kept_bytes: int
    ) -> DistributedUpdateWeightsOutput:
        assert self._route is not None
        transport, target = self._route.transport, self._route.target

        self.torn = f"update {request.update} broke off while weights were being written"

        def move() -> None:
            with clock("move"):
                transport.move()
            with clock("finish"):
                target.program.finish()
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)

        _, error = _attempt(move)
        # Buffers of an earlier update count too, and so do those that found room in freed memory.
        report = RankReport(
            self._control.rank,
            transport.received_bytes,
            target.needs.least_bytes,
            max(meter.extra_bytes() + kept_bytes, self._route.held_bytes),
            clock.seconds,
        )
        moved = self._control.gather(_Moved(error, report, transport.read_bytes), request.timeout_s)
        if refused := self._refused("move", [m.error for m in moved]):
            self._forget()
            return refused
        self.torn = ""
        read: dict[int, int] = {}
        for m in moved:
            for trainer_rank, n in m.read_bytes.items():
                read[trainer_rank] = read.get(trainer_rank, 0) + n
        return DistributedUpdateWeightsOutput(
            success=True,
            message=self._route.remark,
            transport=self._route.kind,
            transport_reason=self._route.why,
            read_bytes=read,
            ranks=tuple(m.report for m in moved if m.report is not None),
        )

    def _refused(self, phase: str, errors: Sequence[str]) -> DistributedUpdateWeightsOutput | None:
        """The answer when any rank failed: what the first of them said, and who else failed."""
        failed = [rank for rank, error in enumerate(errors) if error]
        if not failed:
            return None
        others = f" (engine ranks {failed} failed)" if len(failed) > 1 else ""
        message = f"{phase}, engine rank {failed[0]}: {errors[failed[0]]}{others}"
        return DistributedUpdateWeightsOutput(success=False, message=message, torn=bool(self.torn))


class _Clock:
    """Seconds per phase: `with clock("move"): ...`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = time.perf_counter() - started


def _attempt(step: Callable[[], T]) -> tuple[T | None, str]:
    """A step's result, or what went wrong. The other ranks must hear of any failure, so all are caught."""
    try:
        return step(), ""
    except ReshardError as error:
        return None, str(error)
    except Exception as error:
        logger.exception("update failed")
        return None, f"{type(error).__name__}: {error}"
