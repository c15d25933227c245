"""A process's NIXL agent: registers memory, and reads that of other processes by one-sided transfers over UCX.

NIXL is optional (`pip install sglang-reshard[nixl]`). UCX chooses the way to each peer: RDMA, CUDA IPC, shared memory
or TCP; its environment variables (UCX_TLS, UCX_NET_DEVICES) overrule it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch

from sglang_reshard.errors import Mismatch, PeerDisconnected, ReshardError, Unsupported
from sglang_reshard.routes.nixl.remote_shards import GPU, HOST

_NOT_REGISTERED = ("nixlNotFoundError", "nixlInvalidParamError")  # of memory that is read
INSTALL = "pip install 'sglang-reshard[nixl]'"


@cache
def _nixl() -> Any:
    """Returns the module of NIXL's agents. Raises Unsupported where it is not installed."""
    try:
        from nixl import _api  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise Unsupported(
            f"NIXL cannot be imported on {socket.gethostname()} ({error}); install it for trainer and engine: "
            f"{INSTALL}, or use another transport"
        ) from error
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # else each agent greets on stdout
    return _api


def memory_kind(device: torch.device) -> tuple[str, int]:
    """Returns NIXL's kind of memory of tensors on `device`, and the number of the GPU in this process."""
    return (HOST, 0) if device.type == "cpu" else (GPU, device.index or 0)


class NixlAgent:
    """One agent of this process. All its methods raise ReshardError if NIXL refuses a call."""

    def __init__(self, owner: str) -> None:
        """`owner` names the rank in errors. Raises Unsupported without NIXL or its UCX backend."""
        self._owner, self._lock = owner, threading.Lock()
        self._open()

    def _open(self) -> None:
        api, owner = _nixl(), self._owner
        with self._errors("create its NIXL agent"):
            self._agent: Any = api.nixl_agent(f"{owner} {uuid.uuid4().hex}", api.nixl_agent_config(backends=["UCX"]))
        if "UCX" not in self._agent.backends:
            raise Unsupported(f"{owner}: NIXL has no UCX backend here; reinstall it: {INSTALL}")

    def register_ranges(self, memory: Iterable[tuple[str, int, int, int]]) -> list[Any]:
        """Registers (kind, address, bytes, GPU) ranges, so that they can be read or read into. Returns a handle."""
        of_kind: dict[str, list[tuple[int, int, int, str]]] = {}
        for kind, address, nbytes, gpu in memory:
            of_kind.setdefault(kind, []).append((address, nbytes, gpu, ""))
        registered: list[Any] = []
        with self._lock, self._errors("register memory with NIXL"):
            for kind, ranges in of_kind.items():
                registered.append(self._agent.register_memory(ranges, kind))
        return registered

    def deregister(self, registered: list[Any]) -> None:
        with self._lock, self._errors("deregister memory from NIXL"):
            while registered:
                self._agent.deregister_memory(registered.pop())

    def metadata(self) -> bytes:
        """Returns what other agents need to reach this one and the memory that is registered now."""
        with self._lock, self._errors("describe its registered memory"):
            found: bytes = self._agent.get_agent_metadata()
            return found

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except ReshardError:
            raise
        except Exception as error:  # NIXL's own are of many classes
            kind: type[ReshardError] = PeerDisconnected if what.startswith("read") else ReshardError
            if what.startswith("prepare a read") and type(error).__name__ in _NOT_REGISTERED:
                kind = Mismatch
            raise kind(f"{self._owner} could not {what}: {type(error).__name__}: {error}") from error
