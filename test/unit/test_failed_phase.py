"""The phase that a failed update is counted under: from the error, not from what its message happens to begin with."""

import pytest

from sglang_reshard.engine.context import Phase, PhaseFailed, failed_phase, failure_message
from sglang_reshard.errors import Aborted, Mismatch


@pytest.mark.parametrize("phase", Phase)
def test_a_vote_that_fails_and_a_rank_that_aborts_name_their_phase(phase):
    message = failure_message(phase.value, [1, 3], "w has another shape")
    assert failed_phase(PhaseFailed(phase, "w has another shape"), Phase.MOVE) == phase.value
    assert failed_phase(Aborted(message), Phase.MOVE) == phase.value


def test_what_ranks_outside_of_the_phases_cancel_is_aborted():
    assert failed_phase(Aborted("trainer rank 1 failed: Mismatch: w"), Phase.MOVE) == "aborted"


def test_any_other_error_is_of_the_rank_s_own_phase():
    assert failed_phase(Mismatch("move, w: has another shape"), Phase.TRACE) == "trace"
    assert failed_phase(ValueError("commit"), Phase.PREPARE) == "prepare"
