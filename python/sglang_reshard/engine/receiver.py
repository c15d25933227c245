"""Receives updates on one engine rank: keeps the session, runs one update at a time, cleans up after failures.

The phases of an update are in `update`. Here: the running update, its session, and whether it runs at once or staged in
parts.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress

import torch

from sglang_reshard import tasks
from sglang_reshard.engine.context import Phase, PhaseFailed, UpdateContext, describe_error, failed_phase
from sglang_reshard.engine.targets import Target
from sglang_reshard.engine.update import UpdateExecutor
from sglang_reshard.errors import Aborted, ConnectionLost, Mismatch, ReshardError, Unsupported
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.observability.logs import log_context
from sglang_reshard.observability.peak_memory import PeakMemory
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.protocol.session import PUBLISHED_S, Session
from sglang_reshard.protocol.validation import MAX_UPDATE, check_request, max_update_s
from sglang_reshard.routes.wire.concurrent_use import warn_of_concurrent_use
from sglang_reshard.trace.program import Program

_IDLE_S = 1.0  # for what is left of an update that has ended
_END_S = 1.0  # for an update that was aborted to end, as long as its control server answers
Output = DistributedUpdateWeightsOutput
Step = Callable[[UpdateContext], Output | None]
_SUCCESS = Output(success=True, message="")


class WeightReceiver:
    """One engine rank's end of the session. Keeps it, and the state of `UpdateExecutor`, between updates.

    No method raises for an update that fails: the output says why, and whether the weights are torn.
    """

    def __init__(self, target: Target, rank: int, size: int, device: torch.device) -> None:
        """Writes `target` on engine rank `rank` of `size`, whose memory is on `device`."""
        self._rank, self._size, self._device = rank, size, device
        self._executor = UpdateExecutor(target, rank, device)
        self._session: Session | None = None
        self._engine = 0  # this one's number in the session
        self._lock = threading.Lock()  # held during an update, and while a session that has ended is dropped
        self._context: UpdateContext | None = None  # of the update under way
        self._staging: Future[Output] | None = None  # of the last `stage`

    @property
    def torn(self) -> str:
        """Why the weights are partly written; empty if they are sound."""
        return self._executor.last.torn

    def update(self, request: DistributedUpdateWeightsReq, refusal: str = "") -> Output:
        """Updates the live parameters to the trainer's weights. Collective over all engine ranks.

        refusal  why this rank must not be updated now, by the caller's knowledge; fails the update on all ranks
        """

        def write(context: UpdateContext) -> Output:
            self._executor.prepare(context, refusal)
            if request.staged:
                self._executor.receive_staged(context)
            return self._written(context, "")

        return self._run(request, write)

    # A staged update in parts, between which the engine continues to generate from the old weights.

    def stage(self, request: DistributedUpdateWeightsReq, refusal: str = "") -> Output:
        """Prepares, and starts a thread that receives apart from the live weights. Collective over all engine ranks."""
        self._staging = None  # that of an aborted update may still be running
        prepared = self._run(request, lambda context: self._executor.prepare(context, refusal))
        if prepared.success:
            if self._size > 1:
                warn_of_concurrent_use("the engine generates")
            self._staging = tasks.start("stage", functools.partial(self._receive, request))
        return prepared

    def staged(self) -> Output | None:
        """Returns the outcome of `stage`; None while it is receiving."""
        return self._staging.result() if self._staging is not None and self._staging.done() else None

    def commit(self, request: DistributedUpdateWeightsReq, refusal: str = "") -> Output:
        """Makes live what was staged, once `staged` reports success on the first rank. Collective."""
        if self._staging is not None:
            wait([self._staging], request.timeout_s)
        return self._run(request, lambda context: self._written(context, refusal), staged=True)

    def _receive(self, request: DistributedUpdateWeightsReq) -> Output:
        def receive(context: UpdateContext) -> None:
            with runtime().own_stream(self._device):
                self._executor.receive_staged(context)

        return self._run(request, receive, staged=True)

    def _written(self, context: UpdateContext, refusal: str) -> Output:
        output = self._executor.write(context, refusal)
        self._leave()
        return output

    # What another engine reads while no update runs, see `extras.replicas.share`.

    def live_program(self) -> tuple[Program, dict[str, tuple[int, ...]]]:
        """Returns what has written the live weights, and the global shapes of checkpoint tensors, by name.

        Raises Unsupported if no update has, or if they were written or moved by others since.
        """
        return self._executor.live_program()

    @contextmanager
    def moving_memory(self) -> Iterator[None]:
        """Within it live parameters may be moved with their storages, in place. The next update plans again.

        Raises Unsupported while an update is under way, staged or not: it holds addresses.
        """
        # The lock is also held for the moment in which a session that has ended is dropped.
        if self._context is not None or not self._lock.acquire(timeout=_IDLE_S):
            raise Unsupported(
                f"engine rank {self._rank} is receiving an update, so its memory cannot be moved into shared memory "
                "now; pull again when the update has ended"
            )
        try:
            yield
            self._executor.accept_new_addresses()
        finally:
            self._lock.release()

    def release_pages(self) -> None:
        """Must be called before the pages of the live weights are released, as a memory saver does, if only for a time.

        Other pages will be at the same addresses then, which nothing else tells. An update that is staged is ended: it
        reads live weights.
        """
        if (context := self._context) is not None:
            context.channel.abort(
                f"engine rank {self._rank}: its weights are being released; repeat the update when they are resumed"
            )
        with self._lock:
            self._executor.release_pages()

    def written_by_others(self) -> None:
        """All weights were written, but by no update: they are no longer torn."""
        with self._lock:
            self._executor.written_by_others()

    def close(self) -> None:
        """Leaves the session, and frees all but the weights."""
        with self._lock:
            self._drop_session()

    # -- one update at a time, and what follows a failure

    def _run(self, request: DistributedUpdateWeightsReq, step: Step, *, staged: bool = False) -> Output:
        """Executes a step of an update with the lock held. A failure ends the update, and the output reports it.

        staged  a step of the update that is staged; fails without ending the one that has replaced it, if any
        """
        try:
            check_request(request)
        except Mismatch as error:  # not from a sender of ours: the session in it is not to be trusted
            return self._failed(str(error))
        if not self._lock.acquire(timeout=request.timeout_s):
            return self._failed(
                f"engine rank {self._rank} was busy with another update for {request.timeout_s:.0f} s; repeat this "
                "update, or raise timeout_s"
            )
        try:
            with log_context(**request.labels(), rank=f"engine rank {self._rank}"):
                try:
                    if not staged:
                        return step(self._begin(request)) or _SUCCESS
                    if self._context is None or self._context.request != request:
                        message = f"engine rank {self._rank} has not staged update {request.update}; repeat the update"
                        return self._failed(message, Phase.READY.value)
                    return step(self._context) or _SUCCESS
                except Exception as error:
                    return self._cleaned_up(error, request)
                except BaseException as error:  # Ctrl-C: the other ranks and the trainer would wait for this one
                    self._cleaned_up(error, request)
                    raise
        finally:
            self._lock.release()

    def _cleaned_up(self, error: BaseException, request: DistributedUpdateWeightsReq) -> Output:
        """Ends a failed update: drops what it leaves unusable, and informs the other ranks if they do not know."""
        message = describe_error(error)
        self._executor.transfers.failed(request)
        if isinstance(error, PhaseFailed):  # all engine ranks raise it
            if error.phase is not Phase.PREPARE:  # until then nothing that is kept was changed
                self._executor.transfers.clear()
            self._unmap_together()
        elif isinstance(error, Aborted):  # all ranks raise it
            self._executor.transfers.clear()  # a process group that only some members have made cannot be used
        else:
            message = f"engine rank {self._rank}: {message}"
            if self._context is not None:
                self._context.channel.abort(message)  # first: what was given to the GPU may wait for other ranks
            self._executor.transfers.clear()
        failed = self._failed(message, failed_phase(error, self._context.phase if self._context else Phase.PREPARE))
        if isinstance(error, ConnectionLost):
            self._drop_session()
        else:
            self._end()
        return failed

    def _failed(self, message: str, phase: str = Phase.PREPARE.value) -> Output:
        return Output(success=False, message=message, torn=bool(self.torn), phase=phase)

    def _begin(self, request: DistributedUpdateWeightsReq) -> UpdateContext:
        self._end()
        session = self._join(request)
        with ExitStack() as stack:  # aborts the update if anything fails from here on
            channel = stack.enter_context(
                session.engine_channel(request.update, request.engine, f"engine rank {self._rank}")
            )
            channel.on_abort(lambda _: self._executor.transfers.abort())
            memory = PeakMemory(self._device)
            self._context = UpdateContext(request, session, channel, self._rank, self._size, memory)
            self._limit = self._limited(self._context)
            stack.pop_all()
        return self._context

    def _limited(self, context: UpdateContext) -> threading.Timer:
        """Ends the update, on all ranks, when it has taken as long as the engine lets one take.

        The request bounds each wait only. There are several, and the engine serves nobody until the last has ended.
        """
        limit_s = max_update_s()

        def end() -> None:
            reason = (
                f"engine rank {self._rank}: {context.request.name()} did not end within {limit_s:g} s, the engine's "
                f"limit ({MAX_UPDATE}); look at the logs of the trainer ranks"
            )
            context.channel.abort(reason, wait=False)
            if not limit.finished.wait(_END_S):  # its control server does not answer
                context.session.client.lose(reason)

        limit = threading.Timer(limit_s, end)
        limit.daemon = True
        limit.start()
        return limit

    def _end(self) -> None:
        """Leaves the update that is under way, if there is one, and unmaps what it was to unmap."""
        context = self._leave()
        if context is not None and context.request.unmap_after:
            self._executor.unmap()

    def _leave(self) -> UpdateContext | None:
        context, self._context = self._context, None
        if context is not None:
            self._limit.cancel()
            context.channel.__exit__(None, None, None)
        return context

    def _unmap_together(self) -> None:
        """Unmaps if requested, and waits until all engine ranks have: then the first one answers the trainer."""
        context = self._context
        if context is not None and context.request.unmap_after:
            self._executor.unmap()
            with suppress(ReshardError):  # a rank has died since
                context.all_gather("unmapped", "")

    def _join(self, request: DistributedUpdateWeightsReq) -> Session:
        if self._session is None or (self._session.address, self._engine) != (request.address, request.engine):
            self._drop_session()
            connect_s = min(request.timeout_s, PUBLISHED_S)  # the trainer was there when it sent the request
            self._session = session = Session.join(request.address, request.timeout_s, connect_s)
            self._engine = request.engine
            session.on_engine_end(request.engine, self._session_lost)
        return self._session

    def _session_lost(self, session: Session | None) -> None:
        """Unmaps the memory of a trainer that has ended the session, or has died: else it would not be freed."""
        with self._lock:
            if self._session is not None and self._session is session:
                self._drop_session()

    def _drop_session(self) -> None:
        """Drops all that depends on other ranks; the next update starts from a new connection."""
        self._end()
        self._executor.transfers.clear()
        session, self._session = self._session, None
        if session is not None:
            session.client.close()
