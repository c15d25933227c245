"""Damaged deltas are refused before a byte is written, or do what the format says: nothing is written beside memory.

`make test` runs a few hundred of each kind, `make test-all` a million in all.
"""

import os
import signal
import subprocess
import sys

import pytest

from fuzz.delta_runs import KINDS, TESTS, run_cases
from support.sweep import sweep

FEW, MANY = 600, 500_000
DEADLINE_S = 300.0


@pytest.mark.parametrize("at_end", [False, True])
def test_a_write_beside_guarded_memory_ends_the_process(at_end):
    beyond = "64" if at_end else "-1"
    code = (
        "import ctypes; from fuzz.guard_pages import GuardedPages;"
        f"tensor = GuardedPages(1).tensor(64, at_end={at_end}); tensor.fill_(1);"
        f"ctypes.memset(tensor.data_ptr() + {beyond}, 0, 1)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(TESTS)}, timeout=DEADLINE_S)
    assert done.returncode == -signal.SIGSEGV


def check(kind, seed, cases, processes, deadline_s):
    outcome = run_cases(kind, seed, cases, processes, deadline_s)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert outcome.refused + outcome.applied == cases
    assert outcome.refused > cases / 2
    assert outcome.applied > cases / 50


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_deltas_are_refused_or_mean_what_they_say(kind):
    check(kind, 1, FEW, 1, DEADLINE_S)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", [sweep(kind) for kind in KINDS])
def test_a_million_damaged_deltas(kind):
    check(kind, 2, MANY, len(os.sched_getaffinity(0)), 4 * 3600.0)
