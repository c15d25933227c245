"""The numbers in what is said between the two sides."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sglang_reshard.errors import Mismatch
from sglang_reshard.protocol.validation.layouts import MAX_TRAINER_RANKS

if TYPE_CHECKING:  # its module may use this one
    from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, PrepareSend

MAX_BUCKET_BYTES = 1 << 40
MAX_TIMEOUT_S = 1e9
_MAX_UPDATE = (1 << 62) - 1
_MAX_WORD_LENGTH = 4096  # characters of a name, a hash, a host


def check_request(request: DistributedUpdateWeightsReq) -> None:
    """Raise Mismatch for a request of an update that no sender makes."""
    ranks = len(request.trainer_hosts)
    if not 1 <= ranks <= MAX_TRAINER_RANKS or len(request.handles) != ranks or len(request.routes) not in (0, ranks):
        raise Mismatch(
            f"the request is of {ranks} trainer ranks, with {len(request.handles)} memory handles and "
            f"{len(request.routes)} routes; send it with sglang_reshard.api.weight_sender"
        )
    if not 0 <= request.update <= _MAX_UPDATE:
        raise Mismatch(f"the request has the number {request.update}, which no update has")
    _check_bucket(request.bucket_bytes, "the request")
    _check_timeout(request.timeout_s, "the request")
    version = request.weight_version or ""
    words = (request.layout, request.transport, version, request.package_version, request.traceparent)
    for word in (*words, *request.handles, *request.trainer_hosts, *request.routes, *request.ignore):
        if len(word) > _MAX_WORD_LENGTH:
            raise Mismatch(f"the request has a name of {len(word):,} characters: {word[:40]!r}...")


def check_connect(connect: PrepareSend, trainer_ranks: int) -> None:
    """Raise Mismatch for what engine rank 0 cannot mean, where there are so many trainer ranks."""
    who = "engine rank 0's word to connect"
    if len(connect.shares) != trainer_ranks:
        raise Mismatch(f"{who} is for {len(connect.shares)} trainer ranks, and there are {trainer_ranks}")
    engine_ranks = len(connect.intakes)
    for trainer_rank, row in enumerate(connect.shares):
        if len(row) != engine_ranks:
            raise Mismatch(f"{who} gives trainer rank {trainer_rank} {len(row)} shares for {engine_ranks} engine ranks")
        if any(not 0 <= share <= MAX_BUCKET_BYTES for share in row):
            raise Mismatch(f"{who} has a share of trainer rank {trainer_rank} that is no number of bytes: {row}")
    if connect.backend not in ("gloo", "nccl"):
        raise Mismatch(f"{who} is for the backend {connect.backend[:40]!r}, which is neither gloo nor nccl")
    if any(len(word) > _MAX_WORD_LENGTH for word in (connect.route, *connect.intakes)):
        raise Mismatch(f"{who} has a name of more than {_MAX_WORD_LENGTH:,} characters")
    _check_timeout(connect.timeout_s, who)


def _check_bucket(nbytes: int, who: str) -> None:
    if not 1 <= nbytes <= MAX_BUCKET_BYTES:
        raise Mismatch(f"{who} has buckets of {nbytes:,} bytes; they are from 1 to {MAX_BUCKET_BYTES:,}")


def _check_timeout(seconds: float, who: str) -> None:
    if not math.isfinite(seconds) or not 0 < seconds <= MAX_TIMEOUT_S:
        raise Mismatch(f"{who} has waits of {seconds} s; they are more than 0 and at most {MAX_TIMEOUT_S:.0f} s")
