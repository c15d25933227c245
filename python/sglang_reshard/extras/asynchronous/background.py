"""Runs updates during the trainer's next step, from a copy of the weights.

A thread of this process executes them, one at a time. The trainer waits only for the copy and for the previous update.
The handle raises a failure, or else the next call does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Generic, TypeVar

import torch

from sglang_reshard import tasks
from sglang_reshard.errors import DeadlineExceeded
from sglang_reshard.extras.asynchronous.async_copy import AsyncShardCopy
from sglang_reshard.routes.wire.concurrent_use import warn_of_concurrent_use
from sglang_reshard.sources import NamedTensors, TrainerState
from sglang_reshard.trainer.options import UpdateOptions
from sglang_reshard.trainer.update_sender import UpdateSender, raising

T = TypeVar("T")
_GO, _SKIP = b"go", b"skip"


class UpdateHandle(Generic[T]):
    """An update that runs in the background, or was skipped.

    weight_version   that it brings
    skipped          True if another one was still running: nothing was copied, and nothing will be sent
    skipped_before   versions that were skipped since the update before this one
    waited_s         seconds that the call waited for the update before
    copied_s         seconds that the copy took
    """

    def __init__(self, weight_version: str | None, future: Future[T] | None, cancel: Callable[[bool], None]) -> None:
        """`cancel(True)` cancels the update under way, `cancel(False)` takes that back, for the next one."""
        self.weight_version, self.skipped = weight_version, future is None
        self.skipped_before: tuple[str | None, ...] = ()
        self.waited_s = self.copied_s = 0.0
        self._future, self._cancel = future, cancel
        self._seen = False  # whether its failure was raised

    def done(self) -> bool:
        """Returns whether it has ended, with success or without."""
        return self._future is None or self._future.done()

    def wait(self, timeout_s: float | None = None) -> T | None:
        """Returns the report, once the update has ended; None if it was skipped.

        Raises what the update raises, and DeadlineExceeded if it has not ended within `timeout_s`; the update
        continues.
        """
        if self._future is None:
            return None
        try:
            return self._future.result(timeout_s)
        except BaseException as error:
            if self._future.done() and error is self._future.exception():
                self._seen = True
            elif isinstance(error, NotInTime):
                raise DeadlineExceeded(
                    f"update to version {self.weight_version!r} has not ended within {timeout_s:g} s and is still "
                    "running; call wait again, or with a larger timeout_s"
                ) from None
            raise

    def cancel(self) -> None:
        """Aborts the update on all ranks, if it still runs. Engines that are being written become torn.

        `wait` raises TornWeights if an engine is torn, and otherwise Aborted, which says if all engine ranks had
        already written. It returns the report if the engine has answered before. With on_failure="exclude", it returns
        reports if another engine has answered before; those of the other engines contain these errors.
        """
        if self._future is None or self._future.done():
            return
        self._cancel(True)
        self._future.add_done_callback(lambda _: self._cancel(False))  # at once, if it has ended meanwhile

    def raise_unseen(self) -> None:
        """Waits for the end, and raises a failure that nobody has seen yet."""
        if self._future is not None and (error := self._future.exception()) is not None and not self._seen:
            self._seen = True
            raise error


class BackgroundUpdates(Generic[T]):
    """One sender's updates in the background."""

    def __init__(self) -> None:
        self._shadow: AsyncShardCopy | None = None
        self._last: UpdateHandle[T] | None = None
        self._skipped: list[str | None] = []

    def start(
        self,
        sender: UpdateSender,
        run: Callable[[TrainerState | NamedTensors], T],
        named_tensors: NamedTensors | torch.nn.Module,
        options: UpdateOptions,
        *,
        latest_only: bool,
        shadow_device: torch.device | None,
    ) -> UpdateHandle[T]:
        """See `WeightSender.update_async`.

        run  executes the update, by `sender`, with the copy of the shards: an iterable that raises, if there is none
        """
        began = time.perf_counter()
        if latest_only and not self._may_go(sender):
            self._skipped.append(options.weight_version)
            return UpdateHandle(options.weight_version, None, sender.cancel_update)
        if self._last is not None:
            self._last.raise_unseen()
        waited_s = time.perf_counter() - began
        weights: TrainerState | NamedTensors
        try:
            shadow = self._shadow_on(sender, shadow_device)
            weights = shadow.take(named_tensors, partial=options.partial, rename=options.renaming)
            if options.unmap_after:
                shadow.drop_sources()
        except Exception as error:
            weights = raising(error)  # so that the other ranks hear of it
        copied_s = time.perf_counter() - began - waited_s

        def job() -> T:
            report = run(weights)
            if len(sender.ranks[1]) > 1:
                warn_of_concurrent_use("the trainer computes")
            return report

        future = tasks.start("background update", job, daemon=False)
        self._last = handle = UpdateHandle(options.weight_version, future, sender.cancel_update)
        handle.waited_s, handle.copied_s = waited_s, copied_s
        handle.skipped_before, self._skipped = tuple(self._skipped), []
        return handle

    @property
    def shadow_bytes(self) -> int:
        """Bytes that the copy takes, which is kept for the next update."""
        return 0 if self._shadow is None else self._shadow.nbytes

    def wait(self) -> None:
        """Returns once no update runs in the background. Raises nothing."""
        if self._last is not None and self._last._future is not None:
            self._last._future.exception()

    def release(self) -> None:
        """Drops the copy, once no update runs."""
        self.wait()
        if self._shadow is not None:
            self._shadow.release()

    def _may_go(self, sender: UpdateSender) -> bool:
        """Returns whether no update is running, as trainer rank 0 sees it: the ranks have to agree."""
        idle = self._last is None or self._last.done()
        return sender.agree(_GO if idle else _SKIP, "update_async") == _GO

    def _shadow_on(self, sender: UpdateSender, device: torch.device | None) -> AsyncShardCopy:
        if self._shadow is None or self._shadow.device != device:
            if self._shadow is not None:
                self._shadow.release()
            self._shadow = AsyncShardCopy(*sender.ranks, device)
        return self._shadow
