"""Divides tensors among engines that are updated together, so that trainer memory is read about once.

Each engine reads the tensors that it owns from the trainer, and all others from the engines that own them, while these
still read. So no byte travels more than twice, however many engines there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NO_OWNER = -1  # of a tensor that every engine reads from the trainer
# An engine rank says in 63 bits how many of its tensors are complete, in which update and by which plan.
UPDATE_BITS, CHECK_BITS, COUNT_BITS = 23, 20, 20
MAX_UPDATE = (1 << UPDATE_BITS) - 1


def choose_owners(nbytes: Sequence[int], relayed: np.ndarray, engines: int) -> np.ndarray:
    """Returns the number of the engine that owns each tensor; NO_OWNER where the mask `relayed` is not set.

    nbytes  of each tensor

    The tensors up to any one are divided evenly, to the largest of them: what an engine has just read, the others read
    next.
    """
    found = np.full(len(nbytes), NO_OWNER, np.int32)
    read = [0] * engines
    for tensor in np.flatnonzero(relayed).tolist():
        found[tensor] = least = read.index(min(read))
        read[least] += nbytes[tensor]
    return found
