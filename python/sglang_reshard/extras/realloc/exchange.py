"""Collectives over metadata: the first failure of any rank, the source's layout, requests between ranks.

Every function is collective over a CPU group, and raises the same error on all of its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from sglang_reshard.errors import ReshardError
from sglang_reshard.layout.decoders import unpack_blob
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.layout.union import union
from sglang_reshard.trainer.collectives import broadcast_message, gather, translated_errors


def raise_together(problem: ReshardError | None, group: dist.ProcessGroup) -> None:
    """Raises the first rank's problem on all ranks, if any rank has one. One all-reduce of a number if none has."""
    having = torch.tensor([problem is not None], dtype=torch.int32)
    with translated_errors(group):
        dist.all_reduce(having, group=group)

    def fail() -> None:
        if problem is not None:
            raise problem

    if int(having):
        gather(fail, type(None), group)


def union_of_layouts(packed: bytes, digests: Sequence[str], group: dist.ProcessGroup) -> SourceLayout:
    """Returns the layout of all that ranks list.

    packed   this rank's layout, by `pack_blob`
    digests  content hash of each rank's layout. Each distinct layout is broadcast once

    Raises as `union` does.
    """
    own, layouts = dist.get_rank(group), []
    distinct = list(dict.fromkeys(digests))
    for digest in distinct:
        root = digests.index(digest)
        data = broadcast_message(packed if own == root else None, bytes, group, root)
        layouts.append(unpack_blob(data, SourceLayout, digest, what="the source's layout"))
    return union(layouts, [distinct.index(digest) for digest in digests])


def exchange_blobs(outgoing: Mapping[int, bytes], incoming: Mapping[int, int], group: dist.ProcessGroup) -> list[bytes]:
    """Gives every rank what the others have for it. Returns what each rank has for this one, in rank order.

    outgoing  rank -> the bytes for it
    incoming  rank -> the number of bytes that it has for this one
    """
    ranks = range(dist.get_world_size(group))
    data = b"".join(outgoing.get(rank, b"") for rank in ranks)
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    sizes = [incoming.get(rank, 0) for rank in ranks]
    received = torch.empty(sum(sizes), dtype=torch.uint8)
    with translated_errors(group):
        dist.all_to_all_single(received, sent, sizes, [len(outgoing.get(rank, b"")) for rank in ranks], group=group)
    return [part.numpy().tobytes() for part in received.split(sizes)]
