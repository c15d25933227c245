"""A fork of a zygote is what an ordinary start would be, but for its imports; see support/zygote.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from support import zygote
from support.left_behind import settled

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif("SGLANG_RESHARD_SWEEP" in os.environ, reason="make test-all starts everything the ordinary way"),
]

LOOK = r"""
import json, multiprocessing, os, sys

def look():
    return {
        "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "directory": os.getcwd(),
        "arguments": sys.argv[1:], "variables": dict(os.environ), "main": __name__, "path": sys.path,
        "line": open("/proc/self/cmdline").read().rstrip("\0").split("\0"),
        "imported": "sglang.srt.managers.scheduler" in sys.modules,
        "descriptors": [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")],
    }

def tell(pipe):
    pipe.send(look())

if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=tell, args=(theirs,))
    seen = look()
    child.start()
    seen["child"] = ours.recv()
    child.join()
    print(json.dumps(seen))
    sys.exit(7)
"""


def look(folder: Path, **variables: str) -> dict[str, Any]:
    """What a script and a process that it spawns find around them."""
    script = folder / "look.py"
    script.write_text(LOOK)
    # Without LC_ALL Python adds a variable of its own when it starts.
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "PYTHONPATH": str(folder / "its path"), **variables}
    done = subprocess.run(
        [sys.executable, str(script), "x"],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        start_new_session=True,
        check=False,
    )
    assert done.returncode == 7
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("look")
    return look(folder), look(folder, **zygote.ORDINARY)


def test_it_is_what_an_ordinary_start_would_be_but_has_the_imports(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    fork, ordinary = both
    for seen, imported in ((fork, True), (ordinary, False)):
        assert (seen["imported"], seen["child"]["imported"]) == (imported, imported)
        assert seen["parent"] == os.getpid()
        assert seen["child"]["parent"] == seen["pid"]
        assert seen["session"] == seen["child"]["session"] == seen["pid"]
    del ordinary["variables"][zygote.VARIABLE], ordinary["child"]["variables"][zygote.VARIABLE]
    for same in ("directory", "arguments", "variables", "main"):
        assert fork[same] == ordinary[same], same
        assert fork["child"][same] == ordinary["child"][same], same
    assert fork["line"] == ordinary["line"]
    assert fork["child"]["line"][-1] == ordinary["child"]["line"][-1]
    assert fork["path"][:2] == ordinary["path"][:2]
    assert set(fork["path"]) >= set(ordinary["path"])  # imports add to it
    # A helper's socket is all that it has beside them, and what was opened while the zygote imported.
    low = [fd for fd in map(int, fork["descriptors"]) if fd < zygote.LOW_NUMBERS]
    assert len(low) == len(ordinary["descriptors"]) + 1


def test_nothing_is_left_of_it(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    fork, _ = both
    assert settled(lambda: [f"process {pid}" for pid in psutil.pids() if _session(pid) == fork["session"]]) == []


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def test_an_end_by_a_signal_is_told() -> None:
    killed = subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], check=False)
    assert killed.returncode == -9


def test_what_is_read_at_import_has_to_be_the_same() -> None:
    ask = [sys.executable, "-c", "import sys; sys.exit('sglang' in sys.modules)"]
    assert subprocess.run(ask, check=False).returncode == 1
    assert subprocess.run(ask, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode == 0
