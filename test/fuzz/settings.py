"""How many cases there are, and where their randomness comes from.

SGLANG_RESHARD_FUZZ_EXAMPLES  cases of each test (100; 200 under make test-all)
SGLANG_RESHARD_FUZZ_SEED      other cases than the usual ones, which are the same in every run; drawn as many are
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

SWEEP = os.environ.get("SGLANG_RESHARD_SWEEP") == "1"
EXAMPLES = int(os.environ.get("SGLANG_RESHARD_FUZZ_EXAMPLES", "200" if SWEEP else "100"))
SEED = os.environ.get("SGLANG_RESHARD_FUZZ_SEED", "")
MANY = 2000  # more cases than this are drawn by seed: quicker, and a failure is told by its seed and not made smaller


def fuzzed(test: Callable[..., None], sweep: int = 0) -> Callable[..., None]:
    """A test of one argument: a `random.Random` that its case is made with.

    sweep  cases under make test-all, if not as many as others have
    """
    examples = sweep if sweep and SWEEP and "SGLANG_RESHARD_FUZZ_EXAMPLES" not in os.environ else EXAMPLES
    random = st.randoms(use_true_random=bool(SEED) or examples > MANY)
    run: Any = settings(
        max_examples=examples,
        derandomize=not SEED,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )(given(random)(test))
    return seed(int(SEED))(run) if SEED else run
