"""Jobs in forked children compute with torch, whatever their parent has computed before."""

import os
import time

import pytest
import torch

from sglang_reshard.cli.plan.worker_process import ChildFailed, run_in_forks
from sglang_reshard.errors import DeadlineExceeded

NUMEL = 1 << 20  # more than an operator leaves to one thread


def total(job):
    return float(torch.full((NUMEL,), float(job)).sum())


def failing(job):
    raise ValueError(f"job {job}")


def test_children_compute_although_their_parents_openmp_threads_are_gone():
    assert total(1) == NUMEL
    found = dict(run_in_forks(total, [1, 2, 3], processes=2, deadline_seconds=60))
    assert found == {1: NUMEL, 2: 2 * NUMEL, 3: 3 * NUMEL}


def test_the_traceback_of_a_failed_child_is_raised():
    with pytest.raises(ChildFailed, match="ValueError: job 7"):
        list(run_in_forks(failing, [7], processes=1, deadline_seconds=60))


def test_a_child_that_dies_is_told_with_its_exit_code():
    with pytest.raises(ChildFailed, match="exit code 7"):
        list(run_in_forks(lambda _: os._exit(7), ["dead"], processes=1, deadline_seconds=60))


def test_children_have_a_deadline():
    with pytest.raises(DeadlineExceeded, match="sleeper"):
        list(run_in_forks(lambda _: time.sleep(60), ["sleeper"], processes=1, deadline_seconds=0.5))
