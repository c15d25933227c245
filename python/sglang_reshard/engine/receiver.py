"""What a ModelRunner runs: updates as one engine rank lives them, and what becomes of them when they fail.

The phases themselves are in `inbound`. Here: which update is under way, in which session, in how many parts, and who
is told when it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from sglang_reshard.engine.context import PhaseFailed, UpdateContext, phase_of
from sglang_reshard.engine.update import UpdateExecutor
from sglang_reshard.errors import Aborted, ConnectionLost, Mismatch, ReshardError
from sglang_reshard.observability.logs import about, get_logger
from sglang_reshard.observability.peak_memory import PeakMemory
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.validation import check_request

logger = get_logger(__name__)


class _Overtaken(ReshardError):
    """What was staged is not there any more."""


class WeightReceiver:
    """One engine rank's. Keeps its session, and what `UpdateExecutor` keeps, between updates."""

    def __init__(self, model: torch.nn.Module, rank: int, size: int, device: torch.device) -> None:
        """`rank` is this engine rank's among `size`."""
        self._rank, self._size, self._device = rank, size, device
        self._inbound = UpdateExecutor(model, rank, size, device)
        self._session: Session | None = None
        self._busy = threading.Lock()  # held during an update, and while a session that has ended is forgotten
        self._course: UpdateContext | None = None  # the update under way
        self._landing: threading.Thread | None = None
        self._landed: list[DistributedUpdateWeightsOutput] = []  # what became of it, once it is known

    @property
    def torn(self) -> str:
        """Why the weights are partly written, while they are."""
        return self._inbound.torn

    def update(self, request: DistributedUpdateWeightsReq, refusal: str = "") -> DistributedUpdateWeightsOutput:
        """Bring the live parameters to the trainer's weights. All engine ranks call it together.

        refusal  why this rank must not be updated now, as its surroundings know it; the others are told

        Never raises for a failed update: it returns what went wrong instead, and whether the weights are torn.
        """

        def steps(course: UpdateContext) -> DistributedUpdateWeightsOutput:
            self._inbound.make_ready(course, refusal)
            if request.staged:
                self._inbound.land(course)
            return self._inbound.write(course)

        return self._part(request, self._begun, steps)

    # A staged update in parts, between which the engine goes on generating from the old weights.

    def stage(self, request: DistributedUpdateWeightsReq, refusal: str = "") -> DistributedUpdateWeightsOutput:
        """Make ready, and begin to take new weights in beside the live ones, in a thread. All ranks call it."""

        landed: list[DistributedUpdateWeightsOutput] = []  # this one's: one that was given up may end after it began

        def land() -> None:
            with _aside(self._device):
                landed.append(self._part(request, self._open_course, self._inbound.land, ends=False))

        self._landed = landed
        output = self._part(request, self._begun, lambda c: self._inbound.make_ready(c, refusal), ends=False)
        if output.success:
            self._landing = threading.Thread(target=land, name="sglang-reshard landing", daemon=True)
            self._landing.start()
        return output

    def staged(self) -> DistributedUpdateWeightsOutput | None:
        """What became of `stage`; None while it is under way."""
        return self._landed[0] if self._landed else None

    def commit(self, request: DistributedUpdateWeightsReq, refusal: str = "") -> DistributedUpdateWeightsOutput:
        """Make live what is staged, after `staged` has told of success on the first rank. All engine ranks call it."""

        def steps(course: UpdateContext) -> DistributedUpdateWeightsOutput:
            self._inbound.make_ready_to_commit(course, refusal)
            return self._inbound.write(course)

        if self._landing is not None:
            self._landing.join(request.timeout_s)
        return self._part(request, self._open_course, steps)

    # -- the frame of an update

    def _part(
        self,
        request: DistributedUpdateWeightsReq,
        course_of: Callable[[DistributedUpdateWeightsReq], UpdateContext],
        steps: Callable[[UpdateContext], DistributedUpdateWeightsOutput | None],
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
            with about(**request.named(), rank=f"engine rank {self._rank}"):
                return self._tried(request, course_of, steps, ends)
        finally:
            self._busy.release()

    def _tried(
        self,
        request: DistributedUpdateWeightsReq,
        course_of: Callable[[DistributedUpdateWeightsReq], UpdateContext],
        steps: Callable[[UpdateContext], DistributedUpdateWeightsOutput | None],
        ends: bool,
    ) -> DistributedUpdateWeightsOutput:
        try:
            course = course_of(request)
            output = steps(course) or DistributedUpdateWeightsOutput(success=True, message="")
            if ends:
                self._end()
            return output
        except _Overtaken as error:  # what is under way now is another update's
            return self._failed(str(error), "ready")
        except PhaseFailed as refused:
            message, phase = str(refused), self._phase_of(refused)
            if refused.what != "prepare":  # until then nothing that stood was touched
                self._inbound.router.forget()
        except Aborted as error:
            self._inbound.router.forget()  # a group that was made by some of its members only cannot be used
            message, phase = str(error), self._phase_of(error)
        except ReshardError as error:
            self._inbound.router.forget()
            message, phase = f"engine rank {self._rank}: {error}", self._phase_of(error)
            if self._course is not None:
                self._course.talk.abort(message)
            if isinstance(error, ConnectionLost):
                self._drop_session()
        except Exception as error:
            logger.exception("update %d failed", request.update)
            self._inbound.router.forget()
            message, phase = f"engine rank {self._rank}: {type(error).__name__}: {error}", self._phase_of(error)
            if self._course is not None:
                self._course.talk.abort(message)
        self._end()
        return self._failed(message, phase)

    def _failed(self, message: str, phase: str = "prepare") -> DistributedUpdateWeightsOutput:
        return DistributedUpdateWeightsOutput(success=False, message=message, torn=bool(self.torn), phase=phase)

    def _phase_of(self, error: Exception) -> str:
        return phase_of(error, self._course.now if self._course is not None else "prepare")

    def _begun(self, request: DistributedUpdateWeightsReq) -> UpdateContext:
        self._end()
        session = self._join(request)
        with ExitStack() as opened:  # whatever goes wrong from here on, the others hear of it
            talk = opened.enter_context(session.update(request.update, f"engine rank {self._rank}"))
            talk.watch(lambda _: self._inbound.router.break_off())
            course = UpdateContext(request, session, talk, self._rank, self._size, PeakMemory(self._device))
            opened.pop_all()
        self._course = course
        return course

    def _open_course(self, request: DistributedUpdateWeightsReq) -> UpdateContext:
        if self._course is None or self._course.request != request:
            raise _Overtaken(f"engine rank {self._rank}: update {request.update} is not staged here; repeat it")
        return self._course

    def _end(self) -> None:
        """Of the update under way, if there is one."""
        course, self._course = self._course, None
        if course is not None:
            course.talk.__exit__(None, None, None)
            if course.request.let_go:
                self._inbound.router.let_go()

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
        self._inbound.router.forget()
        session, self._session = self._session, None
        if session is not None:
            session.line.close()


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """On a GPU: on a stream beside that on which the model runs. A thread begins at GPU 0."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
