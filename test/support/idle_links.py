"""Connections to a control server on another host that carry nothing: `python idle_links.py ROLE FOLDER INTERFACE`.

serve   the control server, until the other has ended
keep    many connections to it; prints why those that were lost in the meantime were
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from benchmark.hosts.job import read, write
from sglang_reshard.control import Address, ControlClient, ControlServer

CONNECTIONS, IDLE_S = 32, 30.0


def serve(folder: Path, interface: str) -> None:
    server = ControlServer.open(interface)
    write(folder, "address", msgspec.json.encode(server.address).decode())
    read(folder, "done")
    server.close()


def keep(folder: Path, _interface: str) -> None:
    address = msgspec.json.decode(read(folder, "address"), type=Address)
    clients = [ControlClient(address.named("idle"), 60) for _ in range(CONNECTIONS)]
    time.sleep(IDLE_S)
    print([client._lost for client in clients if client.is_lost], flush=True)
    write(folder, "done", "")


if __name__ == "__main__":
    {"serve": serve, "keep": keep}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
