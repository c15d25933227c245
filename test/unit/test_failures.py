"""An error crosses a process boundary as one of this package's, and an update that fails is counted under its phase."""

from __future__ import annotations

import pytest

from sglang_reshard import errors
from sglang_reshard.engine.context import Phase, PhaseFailed, failed_phase, failure_message
from sglang_reshard.errors import Aborted, Mismatch, ReshardError
from sglang_reshard.protocol.messages import Failure, Outcome, decode, encode

KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, ReshardError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_arrives_as_it_was(kind: type[ReshardError]) -> None:
    failure = decode(encode(Failure.of(kind("what is wrong"))), Failure)
    assert (type(failure.error()), str(failure.error())) == (kind, "what is wrong")


@pytest.mark.parametrize(
    "kind", [*(n for n in vars(errors) if getattr(errors, n) not in KINDS), "", "RuntimeError", "a\0b", "x" * 10**6]
)
def test_a_kind_that_is_no_error_of_ours_is_one(kind: str) -> None:
    outcome = decode(encode(Outcome[int](None, Failure(kind, "what is wrong"))), Outcome[int])
    with pytest.raises(ReshardError, match="what is wrong") as raised:
        outcome.result()
    assert type(raised.value) is ReshardError


def test_an_error_that_others_do_not_know_arrives_as_what_it_derives_from() -> None:
    class UnreadableFile(Mismatch):
        pass

    assert type(Failure.of(UnreadableFile("a file")).error()) is Mismatch


@pytest.mark.parametrize("phase", Phase)
def test_a_vote_that_fails_and_a_rank_that_aborts_name_their_phase(phase: Phase) -> None:
    message = failure_message(phase.value, [1, 3], "w has another shape")
    assert failed_phase(PhaseFailed(phase, "w has another shape"), Phase.MOVE) == phase.value
    assert failed_phase(Aborted(message), Phase.MOVE) == phase.value


def test_other_errors_are_of_the_rank_s_own_phase_or_aborted() -> None:
    """Whatever their messages happen to begin with."""
    assert failed_phase(Aborted("trainer rank 1 failed: Mismatch: w"), Phase.MOVE) == "aborted"
    assert failed_phase(Mismatch("move, w: has another shape"), Phase.TRACE) == "trace"
