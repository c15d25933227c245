"""Whether what an engine rank has is what the trainer ranks sent: its digests against theirs."""

from __future__ import annotations

import numpy as np

from sglang_reshard.digest.selection import Selection
from sglang_reshard.digest.target import TargetChecksums
from sglang_reshard.errors import Mismatch
from sglang_reshard.protocol.messages import Verify
from sglang_reshard.protocol.update_channel import UpdateChannel


def selection_of(verify: Verify, update: int) -> Selection:
    """Which elements are looked at in an update: all of them, or others in each."""
    return Selection.full() if verify == "full" else Selection.sample(update)


def check_arrived(
    auditor: TargetChecksums,
    selection: Selection,
    talk: UpdateChannel,
    engine_rank: int,
    trainer_ranks: int,
    timeout_s: float,
) -> None:
    """Raise Mismatch, naming the tensors, where this engine rank's weights are not the trainer's."""
    have = auditor.digests(selection)
    differing = np.flatnonzero(have != talk.vouched(engine_rank, trainer_ranks, timeout_s))
    if len(differing):
        raise Mismatch(
            f"engine rank {engine_rank}: what has arrived is not what was sent: {auditor.explain(differing.tolist())}. "
            "Repeat the update; if it happens again, suspect this host's memory or its network"
        )
