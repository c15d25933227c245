"""The progress of engines that are updated together and pass weights on: each engine rank publishes its progress in one
word.

An engine rank reads the tensors that it owns in the layout's order, and counts in its word those that are complete. It
is registered memory that others read as they read the weights: nothing is sent, and no engine waits for its readers.
The word names the update and the plan it is of, so that nobody takes an engine's weights for others than they are.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from sglang_reshard.errors import ReshardError
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan.read_plan import ReadPlan
from sglang_reshard.routes.nixl.agent import memory_kind
from sglang_reshard.routes.nixl.reader import NixlReader
from sglang_reshard.routes.nixl.remote_shards import RemoteShards
from sglang_reshard.routes.nixl.source import allocate_readable
from sglang_reshard.routes.relay.offers import CHECK_BITS, COUNT_BITS

NO_OWNER = -1  # of a tensor that every engine reads from the trainer
_MIN_POLL_S, _MAX_POLL_S = 2e-4, 2e-2  # the longer nothing has changed, the more seldom the word is read
STALLED_S = 10.0  # without progress, until what an engine has not passed on is read from the trainer


class RelayLost(ReshardError):
    """An engine does not pass on its tensors. `engine` names it. `final`: nor will it in another update."""

    def __init__(self, engine: str, why: str, *, final: bool = False) -> None:
        super().__init__(f"{engine} {why}")
        self.engine, self.final = engine, final


class Progress:
    """An engine rank's word: the number of its complete tensors, and the update."""

    def __init__(self, who: str) -> None:
        """The word is in memory that can be registered so that readers cannot write it. `who` is for warnings."""
        self.word = allocate_readable(8, torch.device("cpu"), who).view(torch.int64)
        self._view = self.word.numpy()
        self.reset()

    def reset(self) -> None:
        """No update has begun."""
        self.begin(0, 0)

    def begin(self, update: int, check: int) -> None:
        """Nothing is complete yet. `check` has CHECK_BITS, the same on all that read."""
        self.update = update
        self._base = update << (COUNT_BITS + CHECK_BITS) | check << COUNT_BITS
        self._view[0] = self._base

    def advance(self, count: int) -> None:
        """The first `count` tensors are complete."""
        if self._view[0] >= 0:
            self._view[0] = self._base | count

    def stop(self, update: int) -> None:
        """Marks memory as not holding what `update` brings. Ranks that still read it stop."""
        self.update = max(self.update, update)
        self._view[0] = -(self.update << (COUNT_BITS + CHECK_BITS)) - 1


class RelayGate:
    """A reader's view of an engine rank's word."""

    def __init__(self, reader: NixlReader, peer: str, engine: str, check: int) -> None:
        """`peer` is the engine rank's name in `reader`; the word is the last of its shards."""
        self._reader, self._peer, self.engine, self._check = reader, peer, engine, check
        self._word = torch.zeros(1, dtype=torch.int64)
        reader.register([self._word.untyped_storage()])
        shard, (kind, gpu) = reader.shard(peer, -1), memory_kind(self._word.device)
        remote, local = (np.array([[address, 8, gpu]]) for address in (shard.address, self._word.data_ptr()))
        self._read = reader.prepare(peer, (shard.kind, remote), (kind, local))
        self._reading = False
        self.begin(0)

    def begin(self, update: int) -> None:
        self._update, self._count, self._needed = update, 0, 0
        self._started = self._since = 0.0  # the last read of the word; progress, or the question for it
        self._poll_s = _MIN_POLL_S
        self._is_last = False

    def is_open(self, needed: int) -> bool:
        """Returns whether `needed` tensors are complete. Raises RelayLost if they will not be, or for too long."""
        now = time.monotonic()
        if needed != self._needed:
            self._needed, self._since, self._poll_s = needed, now, _MIN_POLL_S
        if self._count < needed:
            if self._reading:
                self._take(now)
            elif now >= self._started + self._poll_s:
                self._poll_s = min(2 * self._poll_s, _MAX_POLL_S)
                self._start(now)
            if self._count < needed and now > self._since + STALLED_S:
                raise RelayLost(self.engine, f"has read nothing for {STALLED_S:g} s")
        return self._count >= needed

    def confirm(self) -> bool:
        """Returns True once the engine rank was found to hold still what was read. Raises RelayLost if it does not."""
        now = time.monotonic()
        if not self._is_last:
            if self._reading and not self._take(now):  # one that was started before all had been read
                return False
            self._start(now)
            self._is_last = True
        return self._take(now)

    def check_stalled(self, since: float) -> None:
        """Raises RelayLost if a read that was started at `since` takes too long."""
        if time.monotonic() > since + STALLED_S:
            raise RelayLost(self.engine, f"has not answered for {STALLED_S:g} s")

    def _start(self, now: float) -> None:
        self._reader.start(self._peer, [self._read])
        self._reading, self._started = True, now

    def _take(self, now: float) -> bool:
        """Returns whether the read of the word has ended; what it says is taken note of."""
        if not self._reader.are_done(self._peer, [self._read]):
            self.check_stalled(self._started)
            return False
        self._reading = False
        count = self._decode(int(self._word))
        if count > self._count:
            self._count, self._since = count, now
        return True

    def _decode(self, word: int) -> int:
        if word < 0:
            if (-word - 1) >> (COUNT_BITS + CHECK_BITS) >= self._update:
                raise RelayLost(self.engine, "was not updated")
            return 0
        update, check = word >> (COUNT_BITS + CHECK_BITS), word >> COUNT_BITS & ((1 << CHECK_BITS) - 1)
        if update < self._update:
            return 0
        if (update, check) != (self._update, self._check):
            raise RelayLost(self.engine, "made a different plan")
        return word & ((1 << COUNT_BITS) - 1)


@dataclass(frozen=True, slots=True)
class RelayRoute:
    """Reads of an engine rank from another engine.

    engine, number  its name, and its number among those that are updated together
    layout          of its live weights, with the tensors that it owns, in the order in which it reads them
    read_plan       of this rank, from its ranks
    memory          engine rank -> its shards in the layout's order, and its word, for those that are read
    """

    engine: str
    number: int
    layout: SourceLayout
    read_plan: ReadPlan
    memory: dict[int, RemoteShards]

    def peer(self, engine_rank: int) -> str:
        return f"engine rank {engine_rank} of {self.engine}"


@dataclass(frozen=True, slots=True)
class Relays:
    """An engine rank's part in passing on weights.

    owned_by   number of the engine that owns each of the trainer's tensors; NO_OWNER for none
    own        number of this engine
    routes     from the other engines
    progress   this rank's word
    check      the number that all engine ranks' words have in this plan
    """

    owned_by: np.ndarray
    own: int
    routes: tuple[RelayRoute, ...]
    progress: Progress
    check: int

    @property
    def direct(self) -> np.ndarray:
        """Mask of the tensors that are read from the trainer."""
        return (self.owned_by == self.own) | (self.owned_by == NO_OWNER)

    @property
    def owned(self) -> int:
        return int((self.owned_by == self.own).sum())
