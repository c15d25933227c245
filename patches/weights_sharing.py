"""Shares a server's live weights with another one, and takes another one's, on behalf of the tokenizer manager.

    await weights_sharing.share(manager, request, interface)    # POST /share_weights
    await weights_sharing.pull(manager, request)                # POST /pull_weights

While weights are shared, requests are served; what writes or releases weights waits, see `weights_info.unshared`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from sglang_reshard.control import ControlServer
from sglang_reshard.errors import EngineRefused, ReshardError, TornWeights, Unsupported
from sglang_reshard.extras.replicas.pull import pull as pull_from
from sglang_reshard.extras.replicas.pull import refusal as peer_refusal
from sglang_reshard.extras.replicas.share import has_begun, wait_until_shared
from sglang_reshard.patches import sound_weights, weights_info
from sglang_reshard.patches.schedulers import ask_schedulers
from sglang_reshard.patches.tokenizer_manager import until_written, update_by_server
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    PullWeightsReq,
    SharedWeights,
    ShareWeightsReq,
)
from sglang_reshard.protocol.session import is_loopback
from sglang_reshard.version import check_same_protocol

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


async def share(manager: TokenizerManager, request: ShareWeightsReq, interface: str) -> SharedWeights:
    """Lets the engine ranks share the live weights with one other engine. Returns once they have begun.

    interface  address of this host at which the other engine reaches it

    Raises TornWeights, Mismatch for another protocol, and EngineRefused.
    """
    manager.auto_create_handle_loop()
    check_same_protocol(request.protocol, request.package_version, theirs="the server that asks", ours="this server")
    if torn := sound_weights.torn(manager):
        raise TornWeights(torn)
    if running := weights_info.under_way(manager):
        raise EngineRefused(running)
    live = weights_info.current(manager)
    if not live.engine_ranks:
        raise EngineRefused(
            "the live weights were not brought by an update of sglang-reshard, so it is unknown which checkpoint "
            "tensors they hold. Update this engine first, or start the other one from the same checkpoint"
        )
    try:
        interface = engine_interface(manager, interface)
        server = ControlServer.open(interface)
    except OSError as error:
        raise Unsupported(f"{interface} is not an address of this host: {error}") from error
    request = msgspec.structs.replace(request, address=server.address, weight_version=live.version or None)
    begins = asyncio.create_task(ask_schedulers(manager, request, "share"))
    task = asyncio.create_task(_share(begins, request, live.engine_ranks, server))
    try:
        # No update commits without the control server on which its ranks vote.
        end = functools.partial(asyncio.to_thread, server.close)
        takes_part = functools.partial(has_begun, server, live.engine_ranks)
        weights_info.add_share(manager, task, weights_info.Share(takes_part, end))
    except EngineRefused:
        begins.cancel()
        task.cancel()
        await asyncio.to_thread(server.close)
        raise
    output = await asyncio.shield(begins)
    if not output.success:
        raise EngineRefused(output.message)
    return SharedWeights(server.address, live.version, live.digest, _dtype(manager), live.publication)


async def _share(
    begins: asyncio.Task[DistributedUpdateWeightsOutput],
    request: ShareWeightsReq,
    engine_ranks: int,
    server: ControlServer,
) -> None:
    """Ends when no engine rank reads its weights for the other engine."""
    try:
        with contextlib.suppress(Exception):  # of `begins`, which `share` raises, and of a share that was ended
            if (await begins).success:
                await asyncio.to_thread(wait_until_shared, request, engine_ranks)
    finally:
        await asyncio.to_thread(server.close)  # ends an engine rank's share that another one's failure leaves waiting


@until_written
async def pull(manager: TokenizerManager, request: PullWeightsReq) -> DistributedUpdateWeightsOutput:
    """Updates the engine to another one's live weights, and to their version. Raises nothing."""

    async def update(asked: DistributedUpdateWeightsReq, shared: SharedWeights) -> DistributedUpdateWeightsOutput:
        def unchanged(output: DistributedUpdateWeightsOutput) -> DistributedUpdateWeightsOutput:
            """Compares the digests, if both are of weights in the same dtype."""
            comparable = output.success and shared.digest and output.digest and shared.dtype == _dtype(manager)
            if not comparable or shared.digest == output.digest:
                return output
            message = (
                f"the weights of {request.url} are no longer those of its last update: their digest is "
                f"{output.digest}, but was {shared.digest}. Update that engine, or pull from another one"
            )
            return msgspec.structs.replace(output, success=False, torn=True, message=message)

        asked = msgspec.structs.replace(asked, publication=shared.publication)
        return await update_by_server(manager, asked, unchanged)

    if refusal := peer_refusal(request.url) or weights_info.under_way(manager):
        return DistributedUpdateWeightsOutput(success=False, message=refusal)
    pulling = f"weights of {request.url} are being pulled; repeat this when the pull has ended"
    with weights_info.running(manager, pulling):  # no await since the check, or another update could pass it, too
        try:
            return await pull_from(request, update)
        except ReshardError as error:
            torn = bool(sound_weights.torn(manager))
            return DistributedUpdateWeightsOutput(success=False, torn=torn, message=str(error))


def engine_interface(manager: TokenizerManager, interface: str) -> str:
    """Returns `interface`, or, where only this host can reach it, the one at which the engine's nodes meet."""
    arguments = manager.server_args
    if arguments.nnodes == 1 or not is_loopback(interface):
        return interface
    host = urlsplit(f"//{arguments.dist_init_addr}").hostname  # of [2001:db8::1]:5000, too
    addresses = socket.getaddrinfo(host, None)
    return str(min(addresses, key=lambda found: found[0])[4][0])  # the IPv4 one, if there are both


def _dtype(manager: TokenizerManager) -> str:
    """Returns the engine's dtype: digests of weights are of their bits in it."""
    return str(manager.model_config.dtype).removeprefix("torch.")
