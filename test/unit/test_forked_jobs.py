"""Jobs in forked children compute with torch, whatever their parent has computed before."""

import torch

from sglang_reshard.cli.plan.forked_jobs import run_in_forks

NUMEL = 1 << 20  # more than an operator leaves to one thread


def total(job):
    return float(torch.full((NUMEL,), float(job)).sum())


def test_children_compute_although_their_parents_openmp_threads_are_gone():
    assert total(1) == NUMEL
    found = dict(run_in_forks(total, [1, 2, 3], processes=2, deadline_seconds=60))
    assert found == {1: NUMEL, 2: 2 * NUMEL, 3: 3 * NUMEL}
