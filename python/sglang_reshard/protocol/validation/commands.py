"""Validates the fields of commands."""

from __future__ import annotations

import itertools

from sglang_reshard.errors import Mismatch
from sglang_reshard.protocol.messages import PrepareSend
from sglang_reshard.protocol.validation.requests import (
    MAX_BUCKET_BYTES,
    MAX_NAME_LENGTH,
    MAX_TIMEOUT_S,
    MIN_TIMEOUT_S,
)


def check_prepare_send(command: PrepareSend, trainer_ranks: int) -> None:
    """Raises Mismatch for a command that is not valid for this number of trainer ranks."""
    if len(command.round_bytes) != trainer_ranks:
        raise _invalid_command(f"it is for {len(command.round_bytes)} trainer ranks, and there are {trainer_ranks}")
    engine_ranks = len(command.read_plans)
    for trainer_rank, row in enumerate(command.round_bytes):
        if len(row) != engine_ranks:
            raise _invalid_command(
                f"trainer rank {trainer_rank} has {len(row)} sizes of a round for {engine_ranks} engine ranks"
            )
        if any(not 0 <= nbytes <= MAX_BUCKET_BYTES for nbytes in row):
            raise _invalid_command(
                f"a size of a round of trainer rank {trainer_rank} is not from 0 to {MAX_BUCKET_BYTES:,} bytes: {row}"
            )
    if command.backend not in ("gloo", "nccl", "nixl"):
        raise _invalid_command(f"the backend {command.backend[:40]!r} is not gloo, nccl or nixl")
    if command.backend != "nixl":  # which connects no communicator
        _check_groups(command)
    if any(len(name) > MAX_NAME_LENGTH for name in (command.transfer, *command.read_plans)):
        raise _invalid_command(f"a name has more than {MAX_NAME_LENGTH:,} characters")
    if not MIN_TIMEOUT_S <= command.timeout_s <= MAX_TIMEOUT_S:
        raise _invalid_command(f"timeout_s={command.timeout_s} is not from {MIN_TIMEOUT_S} to {MAX_TIMEOUT_S:.0f}")


def _check_groups(command: PrepareSend) -> None:
    """Raises Mismatch unless every link is in exactly one communicator, and no member would wait in vain."""
    trainer_ranks, groups = len(command.round_bytes), command.groups
    if len(groups) > len(command.read_plans):
        raise _invalid_command(f"it has {len(groups)} communicators for {len(command.read_plans)} engine ranks")
    group_of: dict[int, int] = {}
    for number, members in enumerate(groups):
        if any(b <= a for a, b in itertools.pairwise(members)):
            raise _invalid_command(f"the members of communicator {number} are not in ascending order: {members[:8]}")
        if members and not 0 <= members[0] <= members[-1] < trainer_ranks + len(command.read_plans):
            raise _invalid_command(f"communicator {number} has members that are not ranks: {members[:8]}")
        for engine_rank in (m - trainer_ranks for m in members if m >= trainer_ranks):
            if group_of.setdefault(engine_rank, number) != number:
                raise _invalid_command(f"engine rank {engine_rank} is a member of several communicators")
    members_of, linked = [set(members) for members in groups], [set[int]() for _ in groups]
    for trainer_rank, row in enumerate(command.round_bytes):
        for engine_rank in (e for e, nbytes in enumerate(row) if nbytes):
            if engine_rank not in group_of or trainer_rank not in members_of[group_of[engine_rank]]:
                raise _invalid_command(
                    f"trainer rank {trainer_rank} and engine rank {engine_rank} are in no communicator together"
                )
            linked[group_of[engine_rank]] |= {trainer_rank, trainer_ranks + engine_rank}
    for number, members in enumerate(groups):
        if not members or not linked[number].issuperset(members):
            raise _invalid_command(f"communicator {number} has members that neither send nor receive: {members[:8]}")


def _invalid_command(why: str) -> Mismatch:
    return Mismatch(
        f"invalid PrepareSend command of engine rank 0: {why}. Do both sides run the same version of sglang-reshard?"
    )
