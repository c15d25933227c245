"""The phases of an update, as one engine rank lives them. The trainer's side of them is `outbound`.

Between the phases all engine ranks exchange verdicts, so that they go on or stop together:

    look     alone: has anything changed? If so: fetch the layout, trace the loader, list what is lacking
    plan     all needs are known: choose the way, map the trainer ranks' memory, check what can be checked
    connect  make groups, connections and views; trainer ranks that send do the same
    move     bytes into the live parameters, or beside them where the update is staged
    verify   digests of what has arrived against the trainer's own, where that is asked for
    commit   what is staged becomes live; the loader's local steps; all ranks say that they have the new weights

The first byte into live memory is written after all ranks have said that they are ready: before `move`, or before
`commit` of a staged update. A failure until then leaves the old weights as they were. One after that leaves the rank
torn until an update succeeds. An update for which nothing has changed goes from `look` straight to `move`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch

from sglang_reshard.engine.context import UpdateContext, attempt
from sglang_reshard.engine.target import TargetPlan
from sglang_reshard.engine.transfer import PreparedTransfer, TransferCache
from sglang_reshard.engine.verification import check_arrived, selection_of
from sglang_reshard.errors import ConnectionLost, ReshardError
from sglang_reshard.observability.report import RankReport
from sglang_reshard.plan import check_transport
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.trace import LiveSignature
from sglang_reshard.version import check_same_version


class _Looked(msgspec.Struct, frozen=True):
    """A rank's verdict on `look`.

    current  its way still stands
    grouped  it has the groups of this session; when some rank has not, all make them anew
    """

    error: str = ""
    current: bool = False
    grouped: bool = False


class _Planned(msgspec.Struct, frozen=True):
    error: str = ""
    plan: str = ""
    claims: str = ""


class _Verdict(msgspec.Struct, frozen=True):
    error: str = ""


class _Written(msgspec.Struct, frozen=True):
    error: str = ""
    report: RankReport | None = None
    read_bytes: dict[int, int] = {}
    digest: str = ""


class UpdateExecutor:
    """One engine rank's. Keeps what stands between updates: the traced loader, mapped memory, groups, views.

    A failure of a phase is raised: Refused and Aborted where all ranks know of it, whatever it was where they do not.
    """

    def __init__(self, model: torch.nn.Module, rank: int, size: int, device: torch.device) -> None:
        """`rank` is this engine rank's among `size`."""
        self._model, self._rank, self._size, self._device = model, rank, size, device
        self._signature = LiveSignature(model)
        self._target: TargetPlan | None = None
        self.router = TransferCache(rank, device)
        self.torn = ""  # why the weights are partly written, while they are

    def make_ready(self, course: UpdateContext, refusal: str) -> None:
        """All that can be done before a byte is written anywhere."""
        looked, error = (None, refusal) if refusal else attempt(lambda: self._look(course))
        with self._opens(course, looked is not None and looked.current and not course.request.staged):
            openings = course.agree("prepare", looked or _Looked(error))
        if all(o.current for o in openings):
            course.kept_bytes = self.route.held_bytes
            return
        if not all(o.grouped for o in openings):
            self.router.regroup()
        self._prepare(course)

    def land(self, course: UpdateContext) -> None:
        """What is staged arrives, and is verified."""
        staging = self.route.staging
        assert staging is not None

        def land() -> None:
            staging.refresh()
            self._move(course)
            self._verify(course)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        course.agree("staged", _Verdict(course.together(land)))

    def _look(self, course: UpdateContext) -> _Looked:
        request = course.request
        check_same_version(request.package_version)
        check_transport(request.transport)
        signature = self._signature.current()
        target = self._target
        if target is None or not target.serves(request, signature):
            with course.phase("trace"):
                place = self._rank, self._size
                target = self._target = TargetPlan.of(self._model, signature, request, course.session, place, target)
        route = self.router.route
        return _Looked(current=route is not None and route.serves(request, target), grouped=self.router.grouped)

    def _prepare(self, course: UpdateContext) -> None:
        """Plan and connect, after a `look` that succeeded on all ranks."""
        request, talk, session, target, router = course.request, course.talk, course.session, self._target, self.router
        assert target is not None
        router.drop()
        with course.phase("plan"):
            needs = course.gather("needs", target.needs)
            planned, error = attempt(lambda: router.plan(request, needs, session, target))
            verdict = _Planned(error, planned.choice.digest(), planned.claims) if planned else _Planned(error)
            verdicts = course.agree("plan", verdict)
        if planned is None or len({v.plan for v in verdicts}) > 1:
            raise ReshardError("engine ranks made different plans; this is a bug, please report it")
        with course.phase("connect"):
            if planned.connect is not None:  # trainer ranks have a say, which one engine rank listens to
                leads = self._rank == 0
                call = lambda: router.call_trainers(request, planned, talk)  # noqa: E731
                _, error = attempt(call) if leads else (None, "")
                course.agree("call", _Verdict(error))
            claims = tuple(v.claims for v in verdicts)
            connect = lambda: router.connect(request, planned, claims, session, talk.scope, target)  # noqa: E731
            with self._opens(course, not request.staged):
                course.agree("connect", _Verdict(course.together(connect)))

    def make_ready_to_commit(self, course: UpdateContext, refusal: str) -> None:
        """Once more, where time has passed since the new weights were staged."""
        with self._opens(course):
            course.agree("ready", _Verdict(refusal))

    def write(self, course: UpdateContext) -> DistributedUpdateWeightsOutput:
        """All that writes into live memory."""
        request, route = course.request, self.route
        self.torn = _torn(request)

        def write() -> None:
            if route.staging is None:
                self._move(course)
                self._verify(course)
            with course.phase("commit"):
                if route.staging is not None:
                    route.staging.commit()
                route.target.program.finish()
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)

        error = course.together(write)
        # Buffers of an earlier update count too, and so do those that found room in freed memory.
        report = RankReport(
            rank=self._rank,
            received_bytes=route.transport.received_bytes,
            least_bytes=route.target.needs.least_bytes,
            peak_extra_bytes=max(course.meter.extra_bytes() + course.kept_bytes, route.held_bytes),
            seconds=course.seconds,
            staged_bytes=route.staged_bytes,
        )
        written = course.agree("commit", _Written(error, report, route.transport.read_bytes, course.digest))
        self.torn = ""
        read: dict[int, int] = {}
        for w in written:
            for trainer_rank, n in w.read_bytes.items():
                read[trainer_rank] = read.get(trainer_rank, 0) + n
        return DistributedUpdateWeightsOutput(
            success=True,
            message=route.planned.remark,
            transport=route.planned.choice.name,
            transport_reason=route.planned.choice.why,
            predicted_seconds=route.planned.choice.seconds,
            digest=written[0].digest,
            tensors=len(route.target.catalog.layout.tensors),
            source_bytes=route.target.catalog.nbytes,
            read_bytes=read,
            ranks=tuple(w.report for w in written if w.report is not None),
        )

    def _move(self, course: UpdateContext) -> None:
        with course.phase("move"):
            if self._rank == 0:
                self.router.start(course.request, course.talk)
            self.route.transport.move()

    def _verify(self, course: UpdateContext) -> None:
        request, auditor = course.request, self.route.planned.auditor
        if auditor is None:
            return
        with course.phase("verify"):
            selection = selection_of(request.verify, request.update)
            trainer_ranks = len(request.trainer_hosts)
            check_arrived(auditor, selection, course.talk, self._rank, trainer_ranks, request.timeout_s)
            if self._rank == 0 and request.verify == "full":
                course.digest = course.talk.whole_digest(trainer_ranks, request.timeout_s)

    @property
    def route(self) -> PreparedTransfer:
        route = self.router.route
        assert route is not None
        return route

    @contextmanager
    def _opens(self, course: UpdateContext, may_write: bool = True) -> Iterator[None]:
        """What ranks say to each other here may let them write into live memory: who cannot hear it is torn."""
        try:
            yield
        except ConnectionLost:
            if may_write:
                self.torn = _torn(course.request)
            raise


def _torn(request: DistributedUpdateWeightsReq) -> str:
    return f"update {request.update} broke off while weights were being written"
