"""A command's descendants are all ended, detached ones too, and their shared memory with them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from support import descendants

# Its child starts a daemon in a session of its own, with a named segment, and ends.
_DETACHING = """
import multiprocessing.shared_memory, os, subprocess, sys, time
daemon = '''
import os, time, torch.multiprocessing as mp, multiprocessing.shared_memory
mp.set_sharing_strategy("file_system")
segment = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
import torch
tensor = torch.zeros(9).share_memory_()
print("daemon", os.getpid(), segment.name, flush=True)
time.sleep(600)
'''
if sys.argv[1] == "child":
    subprocess.Popen([sys.executable, "-c", daemon], start_new_session=True)
else:
    subprocess.run([sys.executable, __file__, "child"])
    time.sleep({seconds})
"""


def prepared(folder: Path, seconds: float) -> list[str]:
    script = folder / "detaching.py"
    script.write_text(_DETACHING.replace("{seconds}", str(seconds)))
    return [sys.executable, str(script), "parent"]


def assert_nothing_left(log: Path) -> None:
    _, pid, segment = next(line for line in log.read_text().splitlines() if line.startswith("daemon")).split()
    assert not psutil.pid_exists(int(pid))
    assert not Path("/dev/shm", segment.lstrip("/")).exists()
    assert not list(Path("/dev/shm").glob(f"torch_{pid}_*"))


def test_a_daemon_ends_with_its_command(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert descendants.run(prepared(tmp_path, 8), dict(os.environ), tmp_path, log, 60) == 0
    assert_nothing_left(log)


def test_a_daemon_ends_at_the_deadline(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(descendants.Deadline, match="not done after 8 s"):
        descendants.run(prepared(tmp_path, 600), dict(os.environ), tmp_path, log, 8)
    assert_nothing_left(log)


def test_others_children_are_left_alone(tmp_path: Path) -> None:
    with psutil.Popen(["sleep", "60"]) as other:
        descendants.run([sys.executable, "-c", "pass"], dict(os.environ), tmp_path, tmp_path / "log", 30)
        assert other.is_running()
        other.kill()
