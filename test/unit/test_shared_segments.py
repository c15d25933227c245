"""Shared memory of processes that were killed is found while they live, and removed afterwards."""

import subprocess
import sys
from pathlib import Path

from sglang_reshard.shared_segments import remove, segments_of

HOLDER = """
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *_: None  # as if its tracker had been killed too
held = shared_memory.SharedMemory(create=True, size=4096)
print(held.name, flush=True)
input()
"""


def test_a_killed_process_leaves_a_segment_that_is_found_and_removed():
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    segment = Path("/dev/shm") / holder.stdout.readline().strip()
    found = segments_of([holder.pid])
    holder.kill()
    holder.communicate()
    assert found == {segment}
    assert segment.exists()
    remove(found)
    assert not segment.exists()
    remove(found)  # again is no error


def test_a_process_that_has_ended_has_none():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert segments_of([ended.pid]) == set()
