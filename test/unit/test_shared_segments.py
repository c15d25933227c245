"""Shared memory of processes that were killed is found while they live, and removed afterwards."""

import os
import subprocess
import sys
from pathlib import Path

from sglang_reshard.patches.shared_segments import is_engine_only, remove, segments_of, unregister

MAPPER = """
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    held = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
input()
"""


def test_a_killed_process_leaves_sglangs_file_of_loads_which_is_found_and_removed():
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
