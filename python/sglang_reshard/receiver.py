"""What a ModelRunner runs: an update as one engine rank lives it.

Between the phases all engine ranks exchange verdicts, so that they go on or stop together:

    look     alone: has anything changed? If so: fetch the layout, trace the loader, list what is lacking
    plan     all needs are known: choose the way, map the trainer ranks' memory, check what can be checked
    connect  make groups, connections and views; trainer ranks that send do the same
    move     bytes into the live parameters, then the loader's local steps

Up to `connect` nothing has been written. A failure after that leaves the rank torn until an update
succeeds. An update for which nothing has changed goes from `look` straight to `move`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import torch

from sglang_reshard.control import Control
from sglang_reshard.errors import ReshardError
from sglang_reshard.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.peak_memory import PeakMemory
from sglang_reshard.plan import check_transport
from sglang_reshard.report import RankReport
from sglang_reshard.route import Router
from sglang_reshard.session import Address, Session, when_ended
from sglang_reshard.target import Target
from sglang_reshard.trace import LiveSignature
from sglang_reshard.version import check_same_version

T = TypeVar("T")
logger = logging.getLogger(__name__)


class _Looked(msgspec.Struct, frozen=True):
    """A rank's verdict on `look`.

    current  its way still stands
    grouped  it has the groups of this session; when some rank has not, all make them anew
    """

    error: str = ""
    current: bool = False
    grouped: bool = False


class _Verdict(msgspec.Struct, frozen=True):
    error: str = ""
    plan: str = ""


class _Moved(msgspec.Struct, frozen=True):
    error: str = ""
    report: RankReport | None = None
    read_bytes: dict[int, int] = {}


class WeightReceiver:
    """Keeps what can be reused between updates: session, traced loader, mapped memory, groups, views."""

    def __init__(self, model: torch.nn.Module, control: Control, device: torch.device) -> None:
        self._model, self._control, self._device = model, control, device
        self._signature = LiveSignature(model)
        self._session: Session | None = None
        self._target: Target | None = None
        self._router = Router(control.rank, device)
        self._busy = threading.Lock()  # held during an update, and while a session that has ended is forgotten
        self.torn = ""  # why the weights are partly written, while they are

    def update(self, request: DistributedUpdateWeightsReq, refusal: str = "") -> DistributedUpdateWeightsOutput:
        """Bring the live parameters to the trainer's weights. All engine ranks call it together.

        refusal  why this rank must not be updated now, as its surroundings know it; the others are told

        Never raises for a failed update: every rank returns the same refusal instead.
        """
        with self._busy:
            try:
                output = self._update(request, refusal)
                if request.let_go:
                    self._router.let_go()
                return output
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
            assert self._router.route is not None
            kept_bytes = self._router.route.held_bytes
        else:
            if not all(o.grouped for o in openings):
                self._router.regroup()
            if refused := self._prepare(request, clock):
                return refused
        return self._move(request, clock, meter, kept_bytes)

    def _look(self, request: DistributedUpdateWeightsReq, clock: _Clock) -> _Looked:
        check_same_version(request.package_version)
        check_transport(request.transport)
        session = self._join(request)
        signature = self._signature.current()
        target = self._target
        if target is None or not target.serves(request, signature):
            with clock("trace"):
                place = self._control.rank, self._control.size
                target = self._target = Target.of(self._model, signature, request, session, place, target)
        route = self._router.route
        return _Looked(current=route is not None and route.serves(request, target), grouped=self._router.grouped)

    def _join(self, request: DistributedUpdateWeightsReq) -> Session:
        address = Address(request.session, request.store_host, request.store_port)
        if self._session is None or self._session.address != address:
            self._forget()
            self._session = Session.join(address, request.timeout_s)
            when_ended(address, lambda: self._leave(address), request.timeout_s)
        return self._session

    def _leave(self, address: Address) -> None:
        """A trainer has ended its session, or has died: its memory is freed once nobody maps it."""
        with self._busy:
            if self._session is not None and self._session.address == address:
                self._forget()

    def _forget(self) -> None:
        """Drop all that was agreed with others; the next update starts from a new connection."""
        self._router.forget()
        self._session = None

    def _prepare(self, request: DistributedUpdateWeightsReq, clock: _Clock) -> DistributedUpdateWeightsOutput | None:
        """Plan and connect, after a `look` that succeeded on all ranks; the refusal if that fails on any."""
        session, target, router = self._session, self._target, self._router
        assert session is not None
        assert target is not None
        router.drop()
        with clock("plan"):
            needs = self._control.gather(target.needs, request.timeout_s)
            planned, error = _attempt(lambda: router.plan(request, needs, session, target))
            digest = planned.choice.digest() if planned else ""
            verdicts = self._control.gather(_Verdict(error, digest), request.timeout_s)
        if refused := self._refused("plan", [v.error for v in verdicts]):
            return refused
        if planned is None or len({v.plan for v in verdicts}) > 1:
            return self._refused("plan", ["engine ranks made different plans; this is a bug, please report it"])
        with clock("connect"):
            if planned.connect is not None:  # trainer ranks have a say, which one engine rank listens to
                leads = self._control.rank == 0
                _, error = _attempt(lambda: router.call_trainers(request, planned, session)) if leads else (None, "")
                verdicts = self._control.gather(_Verdict(error), request.timeout_s)
            if not any(v.error for v in verdicts):
                _, error = _attempt(lambda: router.connect(request, planned, session, target))
                verdicts = self._control.gather(_Verdict(error), request.timeout_s)
        if refused := self._refused("connect", [v.error for v in verdicts]):
            self._forget()  # a group that was made by some of its members only cannot be used
            return refused
        return None

    def _move(
        self, request: DistributedUpdateWeightsReq, clock: _Clock, meter: PeakMemory, kept_bytes: int
    ) -> DistributedUpdateWeightsOutput:
        route, session = self._router.route, self._session
        assert route is not None
        assert session is not None
        transport, target = route.transport, route.target

        self.torn = f"update {request.update} broke off while weights were being written"

        def move() -> None:
            with clock("move"):
                if self._control.rank == 0:
                    self._router.start(request, session)
                transport.move()
            with clock("finish"):
                target.program.finish()
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)

        _, error = _attempt(move)
        if error:
            self._router.drop()  # so that ranks that wait for a message of this one hear of it now
        # Buffers of an earlier update count too, and so do those that found room in freed memory.
        report = RankReport(
            self._control.rank,
            transport.received_bytes,
            target.needs.least_bytes,
            max(meter.extra_bytes() + kept_bytes, route.held_bytes),
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
            message=route.planned.remark,
            transport=route.planned.choice.name,
            transport_reason=route.planned.choice.why,
            predicted_seconds=route.planned.choice.seconds,
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
