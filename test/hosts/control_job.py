"""Runs on hosts of test_lost_hosts.py: `python control_job.py ROLE FOLDER ADDRESS`.

serve     hosts a session at ADDRESS, and is in its scope
join      is in the scope; writes when it hears that the scope was cancelled, or that the connection is lost
talk      as join, and says something all the time
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path

import msgspec

from benchmark.hosts.job import read, write
from sglang_reshard.control import Address, ControlClient, ControlServer
from sglang_reshard.errors import ConnectionLost

_WAIT_S = 300.0
SCOPE = "update"


def main(role: str, folder: Path, address: str) -> None:
    if role == "serve":
        server = ControlServer.open(address)
        write(folder, "address", msgspec.json.encode(server.address).decode())
    client = ControlClient(msgspec.json.decode(read(folder, "address"), type=Address), _WAIT_S)
    client.enter(SCOPE, role)
    heard = threading.Event()

    def hear(reason: str) -> None:
        write(folder, f"heard-{role}", f"{time.monotonic()} {reason}")
        heard.set()

    client.watch(SCOPE, hear)
    write(folder, f"ready-{role}", "")
    while not heard.wait(0.2):
        if role == "talk":
            with contextlib.suppress(ConnectionLost):  # which is heard of, too
                client.set({"said": b"something"})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
