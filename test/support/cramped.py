"""Updates where there is too little shared memory, or no room on the disk: `python -m support.cramped JSON`.

It has to be a process of its own, which may mount what it likes: `unshare --map-root-user --mount`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from support.left_behind import Belongings
from support.scenes import Scene

UNSHARE = ["unshare", "--map-root-user", "--mount"]


def run_cramped(job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """What `main` writes for `job`, in mounts of its own."""
    here = Path(__file__).parent.parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    command = [*UNSHARE, sys.executable, "-m", "support.cramped", json.dumps(job)]
    process = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads((Path(job["folder"]) / "seen.json").read_text())


def can_mount() -> bool:
    command = [*UNSHARE, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


def main() -> None:
    job = json.loads(sys.argv[1])
    folder = Path(job["folder"])
    forkserver.ensure_running()  # its socket is in the folder for temporary files
    before = Belongings.of_this_process()
    _mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm")
    scene = Scene(folder)
    seen: dict[str, Any] = {size: little_shared_memory(scene, size) for size in job["sizes"]}
    seen["disk"] = full_disk(scene, folder / "full")
    scene.end()
    seen["left"] = scene.watch.left_since(before)
    (folder / "seen.json").write_text(json.dumps(seen))


def little_shared_memory(scene: Scene, size: str) -> dict[str, Any]:
    """An update that there is no room for, and another one when there is."""
    _mount("-o", f"remount,size={size}", "/dev/shm")
    scene.make_ready()
    new = scene.begin("ipc")
    scene.until_ended()
    told = [[ended.kind, ended.message] for ended in scene.failures().values()]
    seen = {"told": told, "alive": all(p.alive for p in scene.trainers), "outcome": scene.judge(new)}
    _mount("-o", "remount,size=1m", "/dev/shm")
    scene.make_ready()
    scene.make_good("ipc")
    for player in scene.trainers:
        scene.kill(player)
    return seen


def full_disk(scene: Scene, full: Path) -> int:
    """Updates of processes whose folders, for temporary files and the one they are in, are full. Blocks free there."""
    full.mkdir()
    _mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", str(full))
    os.chdir(full)
    os.environ["TMPDIR"] = tempfile.tempdir = str(full)
    scene.start_engines()
    scene.start_trainers()
    with (full / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"\0" * 4096)
        except OSError:
            pass
    for transport in ("ipc", "p2p", "broadcast"):
        scene.make_good(transport, verify="full")
    free = os.statvfs(full).f_bavail
    os.chdir("/")
    return free


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=30)


if __name__ == "__main__":
    main()
