"""What a ModelRunner runs: an update as one engine rank lives it.

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

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import msgspec
import torch

from sglang_reshard.course import Course, Refused, attempt
from sglang_reshard.errors import Aborted, ConnectionLost, Mismatch, ReshardError
from sglang_reshard.manifests import check_request
from sglang_reshard.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.peak_memory import PeakMemory
from sglang_reshard.plan import check_transport
from sglang_reshard.report import RankReport
from sglang_reshard.route import Route, Router
from sglang_reshard.session import Session
from sglang_reshard.target import Target
from sglang_reshard.trace import LiveSignature
from sglang_reshard.verification import check_arrived, selection_of
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


class _Overtaken(ReshardError):
    """What was staged is not there any more."""


class WeightReceiver:
    """Keeps what can be reused between updates: session, traced loader, mapped memory, groups, views."""

    def __init__(self, model: torch.nn.Module, rank: int, size: int, device: torch.device) -> None:
        """`rank` is this engine rank's among `size`."""
        self._model, self._rank, self._size, self._device = model, rank, size, device
        self._signature = LiveSignature(model)
        self._session: Session | None = None
        self._target: Target | None = None
        self._router = Router(rank, device)
        self._busy = threading.Lock()  # held during an update, and while a session that has ended is forgotten
        self._course: Course | None = None  # the update under way
        self._landing: threading.Thread | None = None
        self._landed: list[DistributedUpdateWeightsOutput] = []  # what became of it, once it is known
        self.torn = ""  # why the weights are partly written, while they are

    def update(self, request: DistributedUpdateWeightsReq, refusal: str = "") -> DistributedUpdateWeightsOutput:
        """Bring the live parameters to the trainer's weights. All engine ranks call it together.

        refusal  why this rank must not be updated now, as its surroundings know it; the others are told

        Never raises for a failed update: it returns what went wrong instead, and whether the weights are torn.
        """

        def steps(course: Course) -> DistributedUpdateWeightsOutput:
            self._make_ready(course, refusal)
            if request.staged:
                self._land(course)
            return self._write(course)

        return self._part(request, self._begun, steps)

    # A staged update in parts, between which the engine goes on generating from the old weights.

    def stage(self, request: DistributedUpdateWeightsReq, refusal: str = "") -> DistributedUpdateWeightsOutput:
        """Make ready, and begin to take new weights in beside the live ones, in a thread. All ranks call it."""

        landed: list[DistributedUpdateWeightsOutput] = []  # this one's: one that was given up may end after it began

        def land() -> None:
            with _aside(self._device):
                landed.append(self._part(request, self._open_course, self._land, ends=False))

        self._landed = landed
        output = self._part(request, self._begun, lambda c: self._make_ready(c, refusal), ends=False)
        if output.success:
            self._landing = threading.Thread(target=land, name="sglang-reshard landing", daemon=True)
            self._landing.start()
        return output

    def staged(self) -> DistributedUpdateWeightsOutput | None:
        """What became of `stage`; None while it is under way."""
        return self._landed[0] if self._landed else None

    def commit(self, request: DistributedUpdateWeightsReq, refusal: str = "") -> DistributedUpdateWeightsOutput:
        """Make live what is staged, after `staged` has told of success on the first rank. All engine ranks call it."""

        def steps(course: Course) -> DistributedUpdateWeightsOutput:
            with self._opens(course):
                course.agree("ready", _Verdict(refusal))
            return self._write(course)

        if self._landing is not None:
            self._landing.join(request.timeout_s)
        return self._part(request, self._open_course, steps)

    # -- the frame of an update

    def _part(
        self,
        request: DistributedUpdateWeightsReq,
        course_of: Callable[[DistributedUpdateWeightsReq], Course],
        steps: Callable[[Course], DistributedUpdateWeightsOutput | None],
        ends: bool = True,
    ) -> DistributedUpdateWeightsOutput:
        """What became of these steps of an update, said on this rank. With them it ends, or when they fail."""
        try:
            check_request(request)
        except Mismatch as error:  # not from a sender of ours: no other rank is told
            return self._failed(str(error))
        if not self._busy.acquire(timeout=request.timeout_s):
            return self._failed(f"engine rank {self._rank} was busy with another update for {request.timeout_s:.0f} s")
        try:
            return self._tried(request, course_of, steps, ends)
        finally:
            self._busy.release()

    def _tried(
        self,
        request: DistributedUpdateWeightsReq,
        course_of: Callable[[DistributedUpdateWeightsReq], Course],
        steps: Callable[[Course], DistributedUpdateWeightsOutput | None],
        ends: bool,
    ) -> DistributedUpdateWeightsOutput:
        try:
            course = course_of(request)
            output = steps(course) or DistributedUpdateWeightsOutput(success=True, message="")
            if ends:
                self._end()
            return output
        except _Overtaken as error:  # what is under way now is another update's
            return self._failed(str(error))
        except Refused as refused:
            message = str(refused)
            if refused.what != "prepare":  # until then nothing that stood was touched
                self._router.forget()
        except Aborted as error:
            self._router.forget()  # a group that was made by some of its members only cannot be used
            message = str(error)
        except ReshardError as error:
            self._router.forget()
            message = f"engine rank {self._rank}: {error}"
            if self._course is not None:
                self._course.talk.abort(message)
            if isinstance(error, ConnectionLost):
                self._drop_session()
        except Exception as error:
            logger.exception("update %d failed", request.update)
            self._router.forget()
            message = f"engine rank {self._rank}: {type(error).__name__}: {error}"
            if self._course is not None:
                self._course.talk.abort(message)
        self._end()
        return self._failed(message)

    def _failed(self, message: str) -> DistributedUpdateWeightsOutput:
        return DistributedUpdateWeightsOutput(success=False, message=message, torn=bool(self.torn))

    def _begun(self, request: DistributedUpdateWeightsReq) -> Course:
        self._end()
        session = self._join(request)
        with ExitStack() as opened:  # whatever goes wrong from here on, the others hear of it
            talk = opened.enter_context(session.update(request.update, f"engine rank {self._rank}"))
            talk.watch(lambda _: self._router.break_off())
            course = Course(request, session, talk, self._rank, self._size, PeakMemory(self._device))
            opened.pop_all()
        self._course = course
        return course

    def _open_course(self, request: DistributedUpdateWeightsReq) -> Course:
        if self._course is None or self._course.request != request:
            raise _Overtaken(f"engine rank {self._rank}: update {request.update} is not staged here; repeat it")
        return self._course

    def _end(self) -> None:
        """Of the update under way, if there is one."""
        course, self._course = self._course, None
        if course is not None:
            course.talk.__exit__(None, None, None)
            if course.request.let_go:
                self._router.let_go()

    def _join(self, request: DistributedUpdateWeightsReq) -> Session:
        if self._session is None or self._session.address != request.address:
            self._drop_session()
            self._session = session = Session.join(request.address, request.timeout_s)
            session.when_lost(lambda: self._leave(session))
        return self._session

    def _leave(self, session: Session) -> None:
        """A trainer has ended its session, or has died: its memory is freed once nobody maps it."""
        with self._busy:
            if self._session is session:
                self._drop_session()

    def _drop_session(self) -> None:
        """Drop all that was agreed with others; the next update starts from a new connection."""
        self._end()
        self._router.forget()
        session, self._session = self._session, None
        if session is not None:
            session.line.close()

    # -- the phases

    def _make_ready(self, course: Course, refusal: str) -> None:
        """All that can be done before a byte is written anywhere."""
        looked, error = (None, refusal) if refusal else attempt(lambda: self._look(course))
        with self._opens(course, looked is not None and looked.current and not course.request.staged):
            openings = course.agree("prepare", looked or _Looked(error))
        if all(o.current for o in openings):
            course.kept_bytes = self._route.held_bytes
            return
        if not all(o.grouped for o in openings):
            self._router.regroup()
        self._prepare(course)

    def _land(self, course: Course) -> None:
        """What is staged arrives, and is verified."""
        staging = self._route.staging
        assert staging is not None

        def land() -> None:
            staging.refresh()
            self._move(course)
            self._verify(course)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        course.agree("staged", _Verdict(course.together(land)))

    def _look(self, course: Course) -> _Looked:
        request = course.request
        check_same_version(request.package_version)
        check_transport(request.transport)
        signature = self._signature.current()
        target = self._target
        if target is None or not target.serves(request, signature):
            with course.phase("trace"):
                place = self._rank, self._size
                target = self._target = Target.of(self._model, signature, request, course.session, place, target)
        route = self._router.route
        return _Looked(current=route is not None and route.serves(request, target), grouped=self._router.grouped)

    def _prepare(self, course: Course) -> None:
        """Plan and connect, after a `look` that succeeded on all ranks."""
        request, talk, session, target, router = course.request, course.talk, course.session, self._target, self._router
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
            claims, store = tuple(v.claims for v in verdicts), session.store(request.timeout_s, talk.scope)
            connect = lambda: router.connect(request, planned, claims, store, target)  # noqa: E731
            with self._opens(course, not request.staged):
                course.agree("connect", _Verdict(course.together(connect)))

    def _write(self, course: Course) -> DistributedUpdateWeightsOutput:
        """All that writes into live memory."""
        request, route = course.request, self._route
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
        written = course.agree("commit", _Written(error, report, route.transport.read_bytes))
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
            read_bytes=read,
            ranks=tuple(w.report for w in written if w.report is not None),
        )

    def _move(self, course: Course) -> None:
        with course.phase("move"):
            if self._rank == 0:
                self._router.start(course.request, course.talk)
            self._route.transport.move()

    def _verify(self, course: Course) -> None:
        request, auditor = course.request, self._route.planned.auditor
        if auditor is None:
            return
        with course.phase("verify"):
            selection = selection_of(request.verify, request.update)
            trainer_ranks = len(request.trainer_hosts)
            check_arrived(auditor, selection, course.talk, self._rank, trainer_ranks, request.timeout_s)

    @property
    def _route(self) -> Route:
        route = self._router.route
        assert route is not None
        return route

    @contextmanager
    def _opens(self, course: Course, may_write: bool = True) -> Iterator[None]:
        """What ranks say to each other here may let them write into live memory: who cannot hear it is torn."""
        try:
            yield
        except ConnectionLost:
            if may_write:
                self.torn = _torn(course.request)
            raise


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """On a GPU: on a stream beside that on which the model runs. A thread begins at GPU 0."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _torn(request: DistributedUpdateWeightsReq) -> str:
    return f"update {request.update} broke off while weights were being written"
