"""What trainer ranks say reaches all of them in order; what one of them fails with is raised on all of them."""

import functools
import threading

import pytest

from sglang_reshard import tasks
from sglang_reshard.errors import DeadlineExceeded, Mismatch, ReshardError
from sglang_reshard.trainer.collectives import Gathering

RANKS = 3


class Table:
    """The exchange of RANKS threads."""

    def __init__(self):
        self._said, self._all = {}, threading.Barrier(RANKS, timeout=10)

    def of(self, rank):
        def exchange(own):
            self._said[rank] = own
            self._all.wait()
            return [self._said[r] for r in range(RANKS)]

        return exchange


def told_by(blocks):
    """Returns what each rank has heard, or the error that it has raised. `blocks`: what each rank says, or raises."""
    table = Table()

    def run(rank):
        try:
            with Gathering(rank, int, table.of(rank)) as told:
                if isinstance(blocks[rank], BaseException):
                    raise blocks[rank]
                told.own = blocks[rank]
        except ReshardError as error:
            return error
        return told.of_all

    ranks = [tasks.start(f"rank {rank}", functools.partial(run, rank)) for rank in range(RANKS)]
    return [rank.result(10) for rank in ranks]


def test_all_ranks_hear_what_each_says_in_rank_order():
    assert told_by([7, 5, 6]) == [[7, 5, 6]] * RANKS
    assert told_by([None, 0, 6]) == [[None, 0, 6]] * RANKS


def test_all_ranks_raise_the_first_failure_which_names_its_rank():
    unexpected = ValueError("no such key")
    errors = told_by([7, unexpected, Mismatch("too late")])
    assert [str(error) for error in errors] == ["trainer rank 1: ValueError: no such key"] * RANKS
    assert [type(error) for error in errors] == [ReshardError] * RANKS
    assert errors[1].__cause__ is unexpected
    assert [type(error) for error in told_by([7, 5, Mismatch("trainer rank 2: w is missing")])] == [Mismatch] * RANKS


def test_an_unexpected_failure_is_in_its_ranks_log(caplog):
    told_by([7, ValueError("no such key"), Mismatch("a word to the user is enough")])
    assert [record.message for record in caplog.records] == ["trainer rank 1 failed"]
    assert caplog.records[0].exc_info[0] is ValueError


def unreachable(_own):
    raise DeadlineExceeded("nobody came")


def test_a_rank_that_fails_alone_raises_its_own_failure():
    with pytest.raises(DeadlineExceeded, match="nobody came"), Gathering(0, int, unreachable):
        pass
    with pytest.raises(Mismatch, match="w is missing"), Gathering(0, int, unreachable):
        raise Mismatch("w is missing")


def test_an_interrupted_rank_waits_for_nobody():
    with pytest.raises(KeyboardInterrupt), Gathering(0, int, unreachable):
        raise KeyboardInterrupt
