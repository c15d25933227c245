"""Shared memory of processes that were killed is found while they live, and removed afterwards."""

import os
import subprocess
import sys
from pathlib import Path

from sglang_reshard.patches.shared_segments import is_engine_only, remove, segments_of, unregister

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


MAPPER = """
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    held = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
input()
"""


def test_so_does_one_that_had_sglangs_file_of_loads():
    file = Path(f"/dev/shm/sglang_loads_of_a_test_{os.getpid()}.shm")
    command = [sys.executable, "-c", MAPPER, str(file)]
    mapper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert mapper.stdout.readline() == "mapped\n"
    found = segments_of([mapper.pid])
    mapper.kill()
    mapper.communicate()
    assert found == {file}
    assert is_engine_only(file)
    remove(found)
    assert not file.exists()
    unregister(found)  # Python's tracker never knew of it


def test_a_process_that_has_ended_has_none():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert segments_of([ended.pid]) == set()
