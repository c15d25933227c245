"""Runs updates during the trainer's next step, from a copy of the weights.

A thread of this process executes them, one at a time. The trainer waits only for the copy and for the previous update.
The handle raises a failure, or else the next call does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Generic, TypeVar

import torch

from sglang_reshard import tasks
from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.errors import DeadlineExceeded, Unsupported
from sglang_reshard.garbage import garbage_collector_paused
from sglang_reshard.gpu.recorded_work import RecordedWork
from sglang_reshard.layout.names import Renaming
from sglang_reshard.layout.regions import aligned
from sglang_reshard.memory.host_arena import Place, places_of
from sglang_reshard.routes.wire.concurrent_use import warn_of_concurrent_use
from sglang_reshard.sources import NamedTensors, TrainerState, as_list, describe
from sglang_reshard.sources.memory_identity import MemoryIdentity
from sglang_reshard.trainer.options import UpdateOptions
from sglang_reshard.trainer.update_sender import UpdateSender, raising

T = TypeVar("T")
_GO, _SKIP = b"go", b"skip"
ALIGN_BYTES = 256


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
        idle = self._last is None or self._last.done()
        # As trainer rank 0 sees it: the ranks have to agree.
        if latest_only and sender.agree(_GO if idle else _SKIP, "update_async") != _GO:
            self._skipped.append(options.weight_version)
            return UpdateHandle(options.weight_version, None, sender.cancel_update)
        if self._last is not None:
            self._last.raise_unseen()
        waited_s = time.perf_counter() - began
        weights: TrainerState | NamedTensors
        try:
            if self._shadow is None or self._shadow.device != shadow_device:
                self._shadow = None  # frees its memory before more is allocated
                self._shadow = AsyncShardCopy(*sender.ranks, shadow_device)
            weights = self._shadow.take(named_tensors, partial=options.partial, rename=options.renaming)
            if options.unmap_after:
                self._shadow.drop_sources()
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


class AsyncShardCopy:
    """A copy of a trainer rank's shards, so that an update can run while the trainer changes the weights.

    It takes one shard's worth of memory, in one allocation for each device. While tensors and layout stay as they are,
    taking a copy is one list of copies into the same memory, and the update that follows plans nothing. Holds views of
    the shards, and so keeps their memory alive, until `release`.
    """

    def __init__(self, trainer_rank: int, global_ranks: tuple[int, ...], device: torch.device | None = None) -> None:
        """`device`: of the copy; by default that of each shard."""
        self._rank, self._global_ranks, self.device = trainer_rank, global_ranks, device
        self._changes: MemoryIdentity | None = None
        self._described: tuple[bool, Renaming | None] = False, None  # by which options
        self._state: TrainerState | None = None
        self._places: list[Place] = []
        self._memory: tuple[torch.Tensor, ...] = ()
        self._copies = CopyList()
        self._work = RecordedWork()  # the last copy
        self.nbytes = 0

    def take(
        self, named_tensors: NamedTensors | torch.nn.Module, *, partial: bool, rename: Renaming | None = None
    ) -> TrainerState:
        """Copies the shards, see `sources.describe`, and returns the copy: the same object until the layout changes.

        Raises what `describe` raises, and Unsupported, with the bytes, if there is no memory for it.
        """
        listed = as_list(named_tensors, self._rank)
        with garbage_collector_paused():
            changes = self._changes if (partial, rename) == self._described else None
            unchanged = changes is not None and changes.unchanged(listed)
        if not unchanged:
            self._changes, self._described = None, (partial, rename)
            rank, ranks = self._rank, self._global_ranks
            given = describe(listed, trainer_rank=rank, global_ranks=ranks, partial=partial, rename=rename)
            self._prepare(given)
            self._changes = MemoryIdentity.of(listed, given.inputs, kept_alive=True)  # by views, for the copies
        assert self._state is not None
        with torch.no_grad():
            self._copies.run()
        self._work.record()
        return self._state

    def drop_sources(self) -> None:
        """Drops the views of the shards, so that their memory can be freed. The copy stays, for the next one.

        Waits for the copies.
        """
        self._work.wait()
        self._changes, self._copies = None, CopyList()

    def release(self) -> None:
        """Drops the copy, and the views of the shards."""
        self._changes, self._state, self._memory, self._copies, self.nbytes = None, None, (), CopyList(), 0

    def _prepare(self, given: TrainerState) -> None:
        """Makes the list of copies, and allocates memory unless that of the last copy will do."""
        places = places_of(given.shards)
        if self._state is None or (self._state.layout, self._places) != (given.layout, places):
            self._state, self._memory = None, ()  # free before more is allocated
            self._state, self._places = self._allocated(given, places), places
        self._copies = CopyList(movable=self._memory)  # by the first update from the copy
        for number, place in enumerate(places):
            if place.first == number and place.nbytes:
                self._copies.add(self._state.shards[number], given.shards[number].detach())
        self._copies.build()

    def _allocated(self, given: TrainerState, places: Sequence[Place]) -> TrainerState:
        """Returns a state like the given one, in separate memory; shards that are one view are one there, too."""
        sizes: dict[torch.device, int] = {}
        begins: list[tuple[torch.device, int]] = []
        for number, (place, shard) in enumerate(zip(places, given.shards, strict=True)):
            device = self.device or shard.device
            begins.append((device, sizes.get(device, 0)) if place.first == number else begins[place.first])
            if place.first == number:
                sizes[device] = begins[number][1] + aligned(place.nbytes, ALIGN_BYTES)
        self.nbytes = sum(sizes.values())
        try:
            memory = {device: torch.empty(n, dtype=torch.uint8, device=device) for device, n in sizes.items()}
        except RuntimeError as error:
            raise Unsupported(
                f"trainer rank {self._rank} cannot allocate {self.nbytes:,} bytes for the copy of its shards: {error}. "
                "Call update instead of update_async, or choose another shadow_device"
            ) from error
        self._memory = tuple(memory.values())
        shards = tuple(
            memory[device][begin : begin + place.nbytes].view(place.dtype).view(place.shape)
            for (device, begin), place in zip(begins, places, strict=True)
        )
        return TrainerState(given.layout, shards, shards, self._work, given.ignored)
