"""Where the ranks of a session meet: trainer rank 0 hosts a `ControlServer`, every rank holds a `ControlClient` to it.

    hub = Hub.open()                           # trainer rank 0; hub.address goes to all the others
    line = Line(hub.address, timeout_s=60)     # every rank
    line.enter("update/7", "engine rank 3 (host h, process 123)")
    everyone = line.gather("update/7/ready", index=3, size=8, data=b"...", timeout_s=60, scope="update/7")
    line.leave("update/7")

It carries metadata, never a tensor. Both sides prove that they know the session's key before either reads a
message of the other, and every frame is authenticated (see `frames`). It is the abort channel too: whoever is
killed between `enter` and `leave` breaks its connection, and all who wait in the same scope hear of it at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sglang_reshard import _deprecated
from sglang_reshard.control.address import Address
from sglang_reshard.control.client import ControlClient, WaitTimedOut
from sglang_reshard.control.server import ControlServer

if TYPE_CHECKING:
    from sglang_reshard.control.torch_store import ControlStore

__all__ = ["Address", "ControlClient", "ControlServer", "ControlStore", "WaitTimedOut"]


def __getattr__(name: str) -> Any:
    """Imports `ControlStore` on first use: it is the only part that needs torch."""
    if name != "ControlStore":
        return _deprecated.attribute(__name__, name)
    return import_module("sglang_reshard.control.torch_store").ControlStore
