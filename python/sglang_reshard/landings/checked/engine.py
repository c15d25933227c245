"""An engine rank's side: requests the trainer's checksums, and compares them with those of the arrived weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sglang_reshard.errors import Mismatch
from sglang_reshard.landings.base import Landing, LandingAround
from sglang_reshard.landings.checked.messages import CHANGED_UNDER_WAY, ChecksAsk, Checksums
from sglang_reshard.landings.checked.regions import Selection
from sglang_reshard.landings.checked.target import TargetChecksums
from sglang_reshard.landings.checked.whole_model import with_kept
from sglang_reshard.plan import TensorIndex
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, Question, encode
from sglang_reshard.protocol.session import Session

if TYPE_CHECKING:
    from sglang_reshard.engine.context import UpdateContext


class Checked(LandingAround):
    """Compares the arrived weights with those of the trainer ranks, by checksums: what is converted, before it is."""

    def __init__(self, inner: Landing, index: TensorIndex, session: Session, names: Sequence[str]) -> None:
        """Publishes the regions. `names`: of the tensors in the digest; empty for the layout's own."""
        super().__init__(inner)
        self._checksums = TargetChecksums(index, inner.program)
        self._regions = session.put(self._checksums.regions)
        self._of_ranks: tuple[str, ...] = (self._regions,)
        self._kept: tuple[str, ...] = ()
        self._names = session.put(tuple(names)) if names else ""

    def place(self, written: Sequence[Collection[str]], read: Collection[str], ahead: int = 0) -> None:
        super().place(written, read, ahead)
        self._checksums.place(self.program, self.complete)

    def arrived(self, turn: int) -> None:
        self._checksums.arrived(turn)
        super().arrived(turn)

    def tells(self) -> str:
        """Returns the content hash of this rank's regions."""
        return self._regions

    def told(self, of_ranks: tuple[str, ...], kept: tuple[str, ...]) -> None:
        self._of_ranks, self._kept = of_ranks, kept

    def begin(self, update: UpdateContext) -> None:
        if update.rank == 0:  # asks for all
            update.channel.ask(self._question(update.request))
        self._checksums.begin(_selection(update.request))
        super().begin(update)

    def check(self, update: UpdateContext) -> str:
        """The digest is known on engine rank 0, and only if all weights were compared, in full."""
        request = update.request
        actual = self._checksums.compute(_selection(request))
        question = self._question(request)
        expected = update.channel.answer(question, Checksums, update.rank, request.timeout_s)
        if len(differing := np.flatnonzero(actual != expected.values)):
            raise Mismatch(
                "the received weights differ from the trainer's: "
                f"{self._checksums.tensor_names(differing.tolist())}. {CHANGED_UNDER_WAY}"
            )
        return with_kept(expected.model, self._kept) if update.rank == 0 and request.verify == "full" else ""

    def _question(self, request: DistributedUpdateWeightsReq) -> Question:
        return Question(encode(ChecksAsk(self._of_ranks, _selection(request), self._names)))


def _selection(request: DistributedUpdateWeightsReq) -> Selection:
    """Returns the elements that are compared: all, or a sample that differs from update to update."""
    return Selection.full() if request.verify == "full" else Selection.sample(request.update)
