"""Run by a raylet in place of Ray's setup_worker.py: has the worker forked by who started Ray; see ray_workers.py.

Alone in its file, and importing next to nothing, as it is started for each worker.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import sys

SOCKET = "TEST_RAY_WORKERS"
LENGTH, STATUS = struct.Struct("!I"), struct.Struct("!i")
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main(arguments: list[str]) -> int:
    """The exit status of the worker. arguments: its script and what that is given, and Ray's for setup_worker.py"""
    context = next((a.removeprefix(_CONTEXT) for a in arguments if a.startswith(_CONTEXT)), "")
    for name, value in json.loads(context or "{}").get("env_vars", {}).items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))  # as Ray does it
    command = [a for a in arguments if not a.startswith((_CONTEXT, _LANGUAGE))]
    order = json.dumps([command, dict(os.environ), os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        socket.send_fds(connection, [LENGTH.pack(len(order))], [1, 2])
        connection.sendall(order)
        status = connection.recv(STATUS.size)
    return STATUS.unpack(status)[0] if len(status) == STATUS.size else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
