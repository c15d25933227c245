"""A worker process: its reports arrive as it makes them, whatever else it prints, and it ends with the reader."""

import os
import time
from pathlib import Path

import psutil
import pytest

from sglang_reshard.cli.plan.worker_process import ChildFailed, run
from sglang_reshard.errors import DeadlineExceeded, Mismatch

WORK = """
import os, sys, time
from sglang_reshard.cli.plan import worker_process
from sglang_reshard.errors import DeadlineExceeded, Unsupported

def twice(job):
    print("SGLang says hello")
    for number in job:
        worker_process.report({"twice": 2 * number})
    raise ValueError("no such model")

def late(_):
    raise DeadlineExceeded("after 3 s these are not done: 1, 2")

def refuses(_):
    print("SGLang warns", file=sys.stderr)
    raise Unsupported("of this checkpoint a config does not tell the tensors")

def stays(_):
    worker_process.report(os.getpid())
    time.sleep(600)
"""


@pytest.fixture
def ask(tmp_path: Path):
    (tmp_path / "work_of_this_test.py").write_text(WORK)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def asked(function, job=None):
        what = "The plan of a model"
        return run("work_of_this_test", function, job, what=what, environment=environment, deadline_seconds=30)

    return asked


def test_answers_come_in_order_and_a_failure_with_its_traceback(ask):
    found = ask("twice", [1, 2])
    assert [next(found), next(found)] == [{"twice": 2}, {"twice": 4}]
    with pytest.raises(ChildFailed, match=r"The plan of a model failed(.|\n)*no such model"):
        next(found)


def test_too_late_is_an_error_of_its_own(ask):
    with pytest.raises(DeadlineExceeded, match=r"^The plan of a model: after 3 s these are not done: 1, 2$"):
        list(ask("late"))
    with pytest.raises(Mismatch, match=r"^of this checkpoint a config does not tell the tensors$"):
        list(ask("refuses"))


def test_a_reader_that_leaves_ends_the_process(ask):
    found = ask("stays")
    pid = next(found)
    found.close()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)
