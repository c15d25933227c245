"""Where the weights of an update arrive on one engine rank, between a route and the live weights.

Once, when a transfer is connected; the route's end goes through its messages in turns, and says which turn brings what:

    core   landing.connect(gather, kept)
    route  landing.place(written, read, ahead)
           views of landing.program

In each update:

    core   landing.begin(update)     before anything arrives
    route  landing.arrived(turn)     in ascending order, when the copies of a turn have been made
    core   landing.check(update)     all has arrived
    core   landing.commit()          the weights become live; then the program's steps run
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_reshard.errors import Mismatch

if TYPE_CHECKING:  # trainer ranks load no tracer
    from sglang_reshard.engine.context import UpdateContext
    from sglang_reshard.landings.checked.target import Checks
    from sglang_reshard.landings.converting import Conversions
    from sglang_reshard.landings.shadow import Apart
    from sglang_reshard.trace.program import Program


class Landing:
    """By default live memory: weights arrive where they are used, in their final form.

    program      what a route writes
    conversions  of weights that arrive in another form
    checks       compare what has arrived with the trainer's, before it is converted
    holds_back   nothing that arrives is live before `commit`
    turns        number of the route's turns after which something is converted
    finished     number of those that are over, in this update
    complete     by turn, the targets that are complete after it and are converted then
    """

    conversions: Conversions | None = None
    checks: Checks | None = None
    turns = finished = 0
    complete: Sequence[Collection[str]] = ()

    def __init__(self, program: Program, apart: Apart | None = None) -> None:
        """`apart`: memory that is written instead of the live weights."""
        self.program = program if apart is None else apart.program
        self._apart, self.holds_back = apart, apart is not None

    @property
    def staged_bytes(self) -> int:
        """Bytes of the memory that holds back what has arrived."""
        return 0 if self._apart is None else self._apart.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all memory that is kept between updates."""
        return self.staged_bytes + (0 if self.conversions is None else self.conversions.nbytes)

    def converting(self, device: torch.device, bucket_bytes: int) -> Landing:
        """Returns this landing, which then converts what its program does, if anything. See `Conversions`."""
        if self.program.arrivals:
            from sglang_reshard.landings.converting import Conversions

            self.conversions = Conversions(self.program, device, bucket_bytes)
        return self

    def connect(self, gather: Callable[[str, Any], list[Any]], kept: tuple[str, ...]) -> None:
        """Exchanges what engine ranks have to know of each other. `gather`, `kept`: see `routes.base.Meeting`."""
        if self.checks is not None:
            self.checks.connect(gather, kept)

    def place(self, written: Sequence[Collection[str]], read: Collection[str], ahead: int = 0) -> None:
        """Allocates memory for converted weights. Views of `program` that were made before are out of date.

        written  targets of the messages of each turn; only those that are converted count
        read     targets that are copied from mapped memory
        ahead    number of turns before its own that a message may already be received in
        """
        if self.conversions is not None:
            self.program, self.complete = self.conversions.place(written, read, ahead)
            self.turns, self.finished = len(self.complete), 0
        if self.checks is not None:
            self.checks.place(self.program, self.complete)

    def turn_of(self, target: str) -> int | None:
        """Returns the turn that copies reads from mapped memory to `target`; None if before all."""
        return None if self.conversions is None else self.conversions.turn_of.get(target)

    def arrived(self, turn: int) -> None:
        """The copies of `turn` have been made."""
        if self.checks is not None:
            self.checks.arrived(turn)
        if self.conversions is not None:
            self.conversions.finish(turn)
        self.finished = turn + 1

    def begin(self, update: UpdateContext) -> None:
        """Prepares for the weights of an update, before any has arrived.

        Raises Unsupported if weights are to be converted and the route has not placed them.
        """
        if self.checks is not None:
            self.checks.begin(update)
        if self.conversions is not None:
            self.conversions.check_placed()
        if self._apart is not None:
            self._apart.begin()
        self.finished = 0

    def check(self, update: UpdateContext) -> str:
        """Checks what has arrived. Returns the digest of all weights, or nothing if it is not known.

        Raises Mismatch if the route has not reported the end of every turn, or, naming the tensors, if this rank's
        weights are not the trainer's.
        """
        if self.finished < self.turns:
            raise Mismatch(
                f"the route has reported the end of {self.finished} of {self.turns} turns: weights of the others were "
                "not converted. Choose another transport"
            )
        return "" if self.checks is None else self.checks.compare(update)

    def commit(self) -> None:
        """Makes live what has arrived."""
        if self._apart is not None:
            self._apart.commit()
