"""Loads snapshots for those who follow a folder, as updates, and in the order of publication only.

    await snapshot_loads.load(manager, request)    # POST /load_snapshot

The engine's tokenizer manager takes a trainer's place: it describes the files, and engine ranks read them
(`extras.snapshots.source`).
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_reshard import tasks
from sglang_reshard.errors import EngineRefused, TornWeights
from sglang_reshard.landings.shadow import NO_ROOM
from sglang_reshard.patches import weights_info
from sglang_reshard.patches.tokenizer_manager import until_written, update_by_server
from sglang_reshard.patches.weights_sharing import engine_interface
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    LoadSnapshotOutput,
    LoadSnapshotReq,
)
from sglang_reshard.protocol.session import LOOPBACK

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    from sglang_reshard.extras.snapshots.source import SnapshotSource


@until_written
async def load(manager: TokenizerManager, asked: LoadSnapshotReq) -> LoadSnapshotOutput:
    """Loads a snapshot, unless the engine holds later weights, or gets others just now.

    Raises Mismatch, EngineRefused and TornWeights for a snapshot that cannot be loaded.
    """
    from sglang_reshard.extras.snapshots.manifest import Entry
    from sglang_reshard.extras.snapshots.source import open_snapshot  # a server that follows nothing needs none of it

    if later := weights_info.under_way(manager) or _held(manager, asked):
        return LoadSnapshotOutput(False, later)
    with weights_info.running(manager, f"snapshot {asked.version} is being loaded; repeat this when that has ended"):
        entry = Entry(asked.version, asked.publication)
        source = await asyncio.to_thread(open_snapshot, Path(asked.path), entry, asked.ignore)
        output = await _update(manager, asked, source, staged=asked.staged and manager.server_args.pp_size == 1)
        if asked.staged and not output.success and NO_ROOM in output.message:
            output = await _update(manager, asked, source, staged=False)
        if not output.success:
            kind = TornWeights if output.torn else EngineRefused
            raise kind(f"snapshot {asked.version} was not loaded: {output.message}")
        if asked.allow_rollback:
            weights_info.of(manager).publication = asked.publication
    message = "; ".join(filter(None, (source.remark, output.message)))
    return LoadSnapshotOutput(True, message, sum(rank.received_bytes for rank in output.ranks))


async def _update(
    manager: TokenizerManager, asked: LoadSnapshotReq, source: SnapshotSource, *, staged: bool
) -> DistributedUpdateWeightsOutput:
    from sglang_reshard.extras.snapshots.source import served

    serving = functools.partial(served, source, asked, staged=staged, interface=engine_interface(manager, LOOPBACK))
    async with tasks.entered(serving) as request:
        return await update_by_server(manager, request)


def _held(manager: TokenizerManager, asked: LoadSnapshotReq) -> str:
    """Returns why the engine needs no such snapshot: it holds later weights; empty if it does not."""
    if asked.allow_rollback or asked.publication >= weights_info.of(manager).publication:
        return ""
    return (
        f"the engine holds later weights than snapshot {asked.version!r}; pass allow_rollback (--allow-rollback) to "
        "load it anyway"
    )
