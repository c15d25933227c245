"""The interface between the core and a landing: what is between a route and the live weights of one engine rank.

Once, when a transfer is connected; the route's end goes through its messages in turns, and says which turn brings what:

    landing.place(written, read, ahead)
    views of landing.program

In each update:

    core   landing.begin(update)     before anything arrives
    route  landing.arrived(turn)     in ascending order, when the copies of a turn have been made
    core   landing.check(update)     all has arrived
    core   landing.commit()          the weights become live; then the program's steps run
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # trainer ranks load no tracer
    from sglang_reshard.engine.context import UpdateContext
    from sglang_reshard.trace.program import Program


class Landing:
    """Live memory: weights arrive where they are used, in their final form.

    program       what a route writes
    holds_back    nothing that arrives is live before `commit`
    nbytes        of all memory that is kept between updates
    staged_bytes  of the part of it that holds back what has arrived
    turns         number of the route's turns after which something is converted
    finished      number of those that are over, in this update
    complete      by turn, the targets that are complete after it and are converted then
    """

    holds_back = False
    nbytes = staged_bytes = turns = finished = 0
    complete: Sequence[Collection[str]] = ()

    def __init__(self, program: Program) -> None:
        self.program = program

    def place(self, written: Sequence[Collection[str]], read: Collection[str], ahead: int = 0) -> None:
        """Allocates memory for converted weights. Views of `program` that were made before are out of date.

        written  targets of the messages of each turn; only those that are converted count
        read     targets that are copied from mapped memory
        ahead    number of turns before its own that a message may already be received in
        """

    def turn_of(self, target: str) -> int | None:
        """Returns the turn that copies reads from mapped memory to `target`; None if before all."""
        return None

    def arrived(self, turn: int) -> None:
        """The copies of `turn` have been made."""

    def tells(self) -> str:
        """Returns what the other engine ranks have to know of this one; empty if nothing."""
        return ""

    def told(self, of_ranks: tuple[str, ...], kept: tuple[str, ...]) -> None:
        """Called once, before the first update.

        of_ranks  by engine rank, what `tells` has returned
        kept      names of the parameters that any engine rank leaves as they are
        """

    def begin(self, update: UpdateContext) -> None:
        """Prepares for the weights of an update, before any has arrived."""

    def check(self, update: UpdateContext) -> str:
        """Checks what has arrived. Returns the digest of all weights, or nothing if it is not known.

        Raises Mismatch, naming the tensors, if this rank's weights are not the trainer's.
        """
        return ""

    def commit(self) -> None:
        """Makes live what has arrived."""


class LandingAround(Landing):
    """A landing around another, to which it leaves all that it does not do itself."""

    def __init__(self, inner: Landing) -> None:
        self.inner, self.holds_back = inner, inner.holds_back
        self._follow()

    def place(self, written: Sequence[Collection[str]], read: Collection[str], ahead: int = 0) -> None:
        self.inner.place(written, read, ahead)
        self._follow()

    def turn_of(self, target: str) -> int | None:
        return self.inner.turn_of(target)

    def arrived(self, turn: int) -> None:
        self.inner.arrived(turn)
        self.finished = self.inner.finished

    def tells(self) -> str:
        return self.inner.tells()

    def told(self, of_ranks: tuple[str, ...], kept: tuple[str, ...]) -> None:
        self.inner.told(of_ranks, kept)

    def begin(self, update: UpdateContext) -> None:
        self.inner.begin(update)
        self.finished = self.inner.finished

    def check(self, update: UpdateContext) -> str:
        return self.inner.check(update)

    def commit(self) -> None:
        self.inner.commit()

    def _follow(self) -> None:
        """Takes over the allocations of the inner landing."""
        inner = self.inner
        self.program, self.turns = inner.program, inner.turns
        self.finished, self.complete = inner.finished, inner.complete
        self.nbytes, self.staged_bytes = inner.nbytes, inner.staged_bytes
