"""Takes the live weights of another engine's server: asks it to share them, and serves the request that follows."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

from sglang_reshard.errors import Aborted, ConnectionLost, DeadlineExceeded, EngineRefused
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    PullWeightsReq,
    SharedWeights,
    ShareWeightsReq,
)
from sglang_reshard.protocol.request_mail import Mailbox
from sglang_reshard.protocol.server_client import ServerClient
from sglang_reshard.version import __version__

Update = Callable[[DistributedUpdateWeightsReq, SharedWeights], Awaitable[DistributedUpdateWeightsOutput]]


async def pull(request: PullWeightsReq, update: Update) -> DistributedUpdateWeightsOutput:
    """Returns the outcome of `update`, which is called with the request that the other server's engine ranks make.

    Raises EngineRefused if the other server does not share, with its reason, and what `ServerClient` raises.
    """
    source = ServerClient(
        request.url, api_key=request.api_key, admin_api_key=request.admin_api_key, timeout_s=request.timeout_s
    )
    wanted = ShareWeightsReq(
        package_version=__version__,
        transport=request.transport,
        bucket_bytes=request.bucket_bytes,
        timeout_s=request.timeout_s,
        verify=request.verify,
    )
    mailbox = None
    try:
        shared = await asyncio.to_thread(source.share_weights, wanted)
        name = f"{socket.gethostname()}-{os.getpid()}"
        mailbox = await asyncio.to_thread(Mailbox, shared.address, name, request.timeout_s)
        asked = await asyncio.to_thread(mailbox.request, request.timeout_s)
        if asked is None:
            raise DeadlineExceeded(
                f"{request.url} announced its weights and did not offer them within {request.timeout_s:.0f} s; look "
                "at its log"
            )
        output = await update(asked, shared)
        await asyncio.to_thread(mailbox.answer, output)
        return output
    except (Aborted, ConnectionLost) as error:
        raise EngineRefused(f"{request.url} did not share its weights: {error}") from error
    finally:
        source.close()
        if mailbox is not None:
            await asyncio.to_thread(mailbox.close)
