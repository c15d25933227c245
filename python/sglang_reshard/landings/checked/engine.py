"""An engine rank's side: asks for the trainer's checksums, and compares those of what has arrived."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_reshard.digest.selection import Selection
from sglang_reshard.digest.target import TargetChecksums
from sglang_reshard.digest.whole_model import with_kept
from sglang_reshard.errors import Mismatch
from sglang_reshard.plan import TensorIndex
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, RequestChecksums
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import EngineChannel
from sglang_reshard.trace.program import Program


class EngineChecks:
    """Checks one engine rank's weights, as `program` writes them.

    checksums  of the weights; sees what is converted on arrival before it is
    regions    content hashes of all engine ranks' regions; of this one's until the others are known
    """

    def __init__(self, index: TensorIndex, program: Program, session: Session, names: Sequence[str]) -> None:
        """Publishes the regions. `names`: by which the digest counts tensors; empty for the layout's own."""
        self.checksums = TargetChecksums(index, program)
        self.regions: tuple[str, ...] = (session.put(self.checksums.regions),)
        self._names = session.put(tuple(names)) if names else ""

    def ask(self, channel: EngineChannel, request: DistributedUpdateWeightsReq) -> None:
        """Asks the trainer ranks for what the weights must be. Called on engine rank 0."""
        channel.request_checksums(self._asked(request))

    def begin(self, request: DistributedUpdateWeightsReq) -> None:
        """Must be called before anything arrives."""
        self.checksums.begin(_selection(request))

    def compare(
        self, channel: EngineChannel, engine_rank: int, request: DistributedUpdateWeightsReq, kept: Sequence[str]
    ) -> str:
        """Returns the digest of all weights; empty unless all were compared, in full, and on all but engine rank 0.

        kept  names of the parameters that any engine rank leaves as they are

        Raises Mismatch, naming the tensors, if this rank's weights are not the trainer's.
        """
        actual = self.checksums.compute(_selection(request))
        expected, digest = channel.get_checksums(self._asked(request), engine_rank, request.timeout_s)
        if len(differing := np.flatnonzero(actual != expected)):
            raise Mismatch(
                "the received weights differ from the trainer's: "
                f"{self.checksums.tensor_names(differing.tolist())}. Repeat the update; if it happens again, suspect "
                "this host's memory or its network"
            )
        return with_kept(digest, tuple(kept)) if engine_rank == 0 and request.verify == "full" else ""

    def _asked(self, request: DistributedUpdateWeightsReq) -> RequestChecksums:
        return RequestChecksums(self.regions, _selection(request), self._names)


def _selection(request: DistributedUpdateWeightsReq) -> Selection:
    """Returns the elements that are compared: all, or a sample that differs from update to update."""
    return Selection.full() if request.verify == "full" else Selection.sample(request.update)
