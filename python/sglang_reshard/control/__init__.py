"""The control plane: trainer rank 0 hosts a `ControlServer`, and every rank has a `ControlClient` to it.

    server = ControlServer.open()                           # trainer rank 0; server.address goes to all other ranks
    client = ControlClient(server.address, timeout_s=60)    # every rank
    client.enter("update/7", "engine rank 3 (host h, process 123)")
    votes = client.all_gather("update/7/ready", index=3, size=8, data=b"...", timeout_s=60, scope="update/7")
    client.leave("update/7")

It carries metadata, never a tensor: keys and values as in torch.distributed.Store, all-gathers that all members finish
or none does, and scopes. A scope is a joint operation of ranks. When one of them is killed between `enter` and `leave`,
its connection breaks, the scope is cancelled, and all who wait in it raise Aborted at once. An all-gather may mark its
scope; `revoke` finds out whether it has, and prevents it otherwise. Both sides prove that they have the session's key
before either reads a message, and every frame is authenticated (`connection`). pyzmq is as fast, but does not say which
peer has died, and bounds no bytes (docs/results/control.md).
"""

from sglang_reshard.control.client import ControlClient, Standing, WaitTimedOut, weakly
from sglang_reshard.control.connection import Address
from sglang_reshard.control.protocol import ENDED
from sglang_reshard.control.server import ControlServer

__all__ = ["ENDED", "Address", "ControlClient", "ControlServer", "Standing", "WaitTimedOut", "weakly"]
