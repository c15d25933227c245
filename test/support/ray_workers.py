"""Ray's workers as forks of a process that has imported verl, where the driver is one.

A raylet starts workers by a command line that comes from the driver. After `fork_workers`, that is
support/ray_worker.py, which sends over a socket what Ray would run, and this process starts it, as its child: so it is
forked (support/zygote.py). All else about the worker is as Ray has it.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from support import ray_worker


def fork_workers() -> None:
    """Of the Ray that this process starts afterwards."""
    from ray._private import ray_constants

    _read_environment()
    path = Path(tempfile.mkdtemp(dir=os.getcwd())) / "s"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    os.environ[ray_worker.SOCKET] = str(path)
    ray_constants.SETUP_WORKER_FILENAME = ray_worker.__file__  # joined to Ray's folder; what is absolute stays so


def _serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_start, args=(connection,), daemon=True).start()


def _start(connection: socket.socket) -> None:
    with connection:
        head, streams, _, _ = socket.recv_fds(connection, ray_worker.LENGTH.size, 2)
        (length,) = ray_worker.LENGTH.unpack(head)
        with connection.makefile("rb") as reader:
            command, environment, directory = json.loads(reader.read(length))
        out, err = streams
        process = subprocess.Popen(
            [sys.executable, "-m", "support.ray_workers", *command],
            env=environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        os.close(out)
        os.close(err)
        connection.sendall(ray_worker.STATUS.pack(process.wait()))


def _read_environment() -> None:
    """Ray's library has done so when it was imported, before this process had its own."""
    from ray._raylet import AuthenticationTokenLoader, Config

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


if __name__ == "__main__":
    _read_environment()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
