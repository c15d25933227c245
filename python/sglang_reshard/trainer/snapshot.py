"""Writes the weights to a folder that any SGLang engine starts from: a Hugging Face checkpoint, without a gather.

    folder/
      step-7/                      model-00001-of-00002.safetensors, ..., model.safetensors.index.json, config.json
      latest -> step-7

Trainer rank 0 lays the files out and reserves their space. Every trainer rank maps them and writes the boxes that it
holds where they belong; of several that hold the same, one does. The folder gets its name when everything is on disk,
so that whoever finds it finds all of it, whenever a rank dies. All ranks have to see the same file system.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_reshard.control import WaitTimedOut
from sglang_reshard.errors import DeadlineExceeded, Mismatch
from sglang_reshard.protocol.messages import Failure, ListedTensors, decode, encode
from sglang_reshard.protocol.session import Session
from sglang_reshard.sources import NamedTensors, TrainerState, describe
from sglang_reshard.trainer.snapshot_files import DEFAULT_FILE_BYTES, SnapshotFiles, SnapshotFolder, write_boxes
from sglang_reshard.trainer.stages import Stages


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """path: the folder. tensors, nbytes: all of them. own_bytes: that this rank has written. seconds: of this rank"""

    path: str
    tensors: int
    nbytes: int
    own_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """See `WeightSender.snapshot`."""

    name: str
    dtype: str | None = None
    partial: bool = False
    keep: int | None = None
    copy_from: Path | None = None
    file_bytes: int = DEFAULT_FILE_BYTES


class SnapshotWriter:
    """Writes snapshots, with the writers of the other trainer ranks."""

    def __init__(self, session: Session, trainer_rank: int, global_ranks: tuple[int, ...], timeout_s: float) -> None:
        self._session, self._rank, self._global_ranks = session, trainer_rank, global_ranks
        self._timeout_s = timeout_s

    def write(
        self, named_tensors: NamedTensors | torch.nn.Module, folder: Path, options: SnapshotOptions
    ) -> SnapshotReport:
        """Collective. Raises, on every rank, what one of them fails with; there is nothing of the snapshot then."""
        began = time.perf_counter()
        if options.keep is not None and options.keep < 1:
            raise Mismatch(f"keep={options.keep} would keep no snapshot at all")
        state = self._described(named_tensors, options.partial)
        files = SnapshotFiles.of(state.layout, options.dtype, options.file_bytes)
        target: SnapshotFolder | None = None
        try:
            with self._phase("reserve"):
                if self._rank == 0:
                    target = SnapshotFolder(folder, options.name)
                    files.reserve(target.partial)
            with self._phase("write"):
                written = write_boxes(state, files, folder / f".{options.name}.partial", self._rank)
            with self._phase("publish"):
                if target is not None:
                    files.write_index(target.partial)
                    target.publish(options.copy_from, options.keep)
        except BaseException:
            if target is not None:
                target.remove()
            raise
        seconds = time.perf_counter() - began
        return SnapshotReport(str(folder / options.name), len(state.layout.tensors), files.nbytes, written, seconds)

    def _described(self, named_tensors: NamedTensors | torch.nn.Module, partial: bool) -> TrainerState:
        """Returns this rank's shards in the layout of all ranks."""
        with self._phase("describe") as phase:
            state = describe(named_tensors, trainer_rank=self._rank, global_ranks=self._global_ranks, partial=partial)
            phase.layout = self._session.put_layout(state.layout)
        if partial:
            stages, _ = Stages.of(self._session, state.layout, None, lambda _: phase.listed)
            return state.within(stages.layout)
        if differing := [rank for rank, layout in enumerate(phase.listed) if layout != phase.layout]:
            raise Mismatch(f"trainer rank {self._rank}: trainer ranks {differing} pass other tensors or shardings")
        return state

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[_Phase]:
        """In its block a rank may fail: all ranks raise then, at the end of the block."""
        phase, failure = _Phase(), None
        try:
            yield phase
        except Exception as error:
            failure = Failure.on(self._rank, error)
        own, size = encode(ListedTensors(phase.layout, failure)), len(self._global_ranks)
        try:
            found = self._session.client.all_gather(f"snapshot/{name}", self._rank, size, own, self._timeout_s)
        except WaitTimedOut as error:
            raise DeadlineExceeded(
                f"trainer ranks {list(error.missing)} did not reach the end of phase '{name}' of a snapshot within "
                f"{self._timeout_s:.0f} s; every trainer rank must call snapshot, look at their logs"
            ) from None
        listed = [decode(data, ListedTensors) for data in found]
        for other in listed:
            if other.failure is not None:
                raise other.failure.error()
        phase.listed = tuple(other.layout for other in listed)


@dataclass(slots=True)
class _Phase:
    """layout: content hash of what this rank lists. listed: of all ranks, after the phase"""

    layout: str = ""
    listed: tuple[str, ...] = ()
