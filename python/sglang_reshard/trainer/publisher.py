"""A trainer rank's shards, made known in the session: layout and handles, when something about them changed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sglang_reshard.errors import Mismatch
from sglang_reshard.protocol.session import Session
from sglang_reshard.sources import (
    NamedTensors,
    SourceLayout,
    TrainerState,
    describe,
    first_not_finite,
    listed,
    tied_names,
)
from sglang_reshard.sources.change_detector import ChangeDetector, Given
from sglang_reshard.transports.memory import Handles, MemoryExporter


@dataclass(frozen=True, slots=True)
class PublishedShards:
    """What is in the session of this rank's shards.

    layout, handles  content hashes, under which they are there
    shard_bytes      bytes that each trainer rank holds
    tied             names of tensors that are the memory of another one, too
    on_gpu           whether a shard is on a GPU
    """

    source: SourceLayout
    layout: str
    handles: str
    shard_bytes: tuple[int, ...]
    tied: tuple[str, ...]
    on_gpu: bool


class ShardPublisher:
    """One trainer rank's. Holds no tensor: a trainer that offloads its weights gets their memory back."""

    def __init__(self, session: Session, trainer_rank: int, global_ranks: tuple[int, ...]) -> None:
        self._session, self._rank, self._global_ranks = session, trainer_rank, global_ranks
        self._memory = MemoryExporter(trainer_rank)
        self._remembered: ChangeDetector | None = None
        self._published: PublishedShards | None = None
        self._handles: Handles | None = None

    def publish(self, named_tensors: NamedTensors | torch.nn.Module, *, check_finite: bool) -> PublishedShards:
        """Bring the session up to date, and the shards to where other processes can read them.

        Raises Unsupported and Mismatch as `describe` does, and Mismatch for what is not finite, where asked.
        """
        with _garbage_collector_paused():
            given = self._news(named_tensors, always=check_finite)
        if given is not None:
            self._remembered = None
            state = describe(given, trainer_rank=self._rank, global_ranks=self._global_ranks)
            if check_finite:
                _check_finite(state, self._rank)
            self._published = self._publish(state)
            self._remembered = ChangeDetector.of(given, state.locals)
        published = self._published
        assert published is not None  # otherwise there were news
        if published.on_gpu:
            torch.cuda.synchronize()  # an engine rank reads from another process: no stream orders us
        return published

    def shards(self, named_tensors: NamedTensors | torch.nn.Module) -> tuple[torch.Tensor, ...]:
        """The shards of what was published last, in the layout's order."""
        return describe(named_tensors, trainer_rank=self._rank, global_ranks=self._global_ranks).shards

    def close(self) -> None:
        self._memory.close()
        self._remembered = None

    def _news(self, named_tensors: NamedTensors | torch.nn.Module, always: bool) -> Given | None:
        """What is given; None for what was published last, unless it is wanted `always`."""
        given = listed(named_tensors, self._rank)
        remembered = self._remembered
        known = remembered is not None and remembered.same(given)
        return given if always or not known else None

    def _publish(self, state: TrainerState) -> PublishedShards:
        known, self._published = self._published, None
        handles = self._memory.export(state.shards, [t.name for t in state.layout.tensors])
        same_layout = known is not None and known.source == state.layout
        same_handles = known is not None and self._handles == handles
        published = PublishedShards(
            state.layout,
            known.layout if known and same_layout else self._session.put_layout(state.layout),
            known.handles if known and same_handles else self._session.put_handles(self._rank, handles),
            known.shard_bytes if known and same_layout else state.layout.local_bytes(),
            tuple(tied_names(state.layout, state.shards)),
            any(shard.is_cuda for shard in state.shards),
        )
        if known is not None and published.handles != known.handles:
            self._session.forget_handles(self._rank, known.handles)
        self._handles = handles
        return published


@contextmanager
def _garbage_collector_paused() -> Iterator[None]:
    """For a (name, tensor) pair of every tensor, made and dropped again.

    So many new objects, update after update, would set off a search for garbage through all that a trainer
    has, half a second in which every rank waits; and there is none among them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check_finite(state: TrainerState, trainer_rank: int) -> None:
    if found := first_not_finite(state.layout, state.shards, trainer_rank):
        raise Mismatch(f"{found}. Nothing was sent; look at the optimizer step, or pass check_finite=False")
