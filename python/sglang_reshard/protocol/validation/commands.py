"""Validates the fields of update requests and commands."""

from __future__ import annotations

import itertools
import math

from sglang_reshard.delta.section import DeltaSection
from sglang_reshard.errors import Mismatch
from sglang_reshard.gpu.device import RankDevice
from sglang_reshard.plan.relay import MAX_UPDATE
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, PrepareSend, Relay
from sglang_reshard.protocol.validation.layouts import MAX_TRAINER_RANKS
from sglang_reshard.protocol.validation.remote_shards import MAX_ADDRESS, MAX_GPUS
from sglang_reshard.transports.remote_shards import MEMORY_KINDS

MAX_BUCKET_BYTES = 1 << 40
MAX_TIMEOUT_S = 1e9
_MAX_UPDATE = (1 << 62) - 1
_MAX_ENGINES = 65536
_MAX_NAME_LENGTH = 4096  # characters of a name, a hash, a host


def check_request(request: DistributedUpdateWeightsReq) -> None:
    """Raises Mismatch for a request that no sender makes."""
    ranks, devices, prepared = len(request.trainer_hosts), len(request.trainer_devices), len(request.prepared)
    equal = len(request.handles) == ranks and {devices, prepared} <= {0, ranks}
    if not 1 <= ranks <= MAX_TRAINER_RANKS or not equal:
        raise _invalid_request(
            f"it has {ranks} trainer hosts, {len(request.handles)} memory handles, {devices} trainer devices and "
            f"{prepared} prepared transfers, expected the same number of each, from 1 to {MAX_TRAINER_RANKS:,}"
        )
    if not 0 <= request.update <= _MAX_UPDATE:
        raise _invalid_request(f"the update number {request.update} is not from 0 to {_MAX_UPDATE:,}")
    if not 1 <= request.bucket_bytes <= MAX_BUCKET_BYTES:
        raise _invalid_request(f"bucket_bytes={request.bucket_bytes:,} is not from 1 to {MAX_BUCKET_BYTES:,}")
    if not _is_timeout(request.timeout_s):
        raise _invalid_request(f"timeout_s={request.timeout_s} is not above 0 and at most {MAX_TIMEOUT_S:.0f}")
    sections = [section for of_ranks in request.sections for section in of_ranks.values()]
    if len(request.sections) not in (0, ranks):
        raise _invalid_request(f"it lists deltas of {len(request.sections)} trainer ranks, expected 0 or {ranks}")
    for section in sections:
        if why := _invalid_section_reason(section):
            raise _invalid_request(f"the delta of a trainer rank {why}")
    if request.relay is not None:
        _check_relay(request, request.relay)
    version = request.weight_version or ""
    names = (request.layout, request.transport, version, request.package_version, request.traceparent)
    lora = (request.lora.name, request.lora.config, request.lora.lora_id) if request.lora is not None else ()
    gpus = [text for device in request.trainer_devices for text in _texts(device)]
    patterns = (*request.apart, *request.apart.values(), *request.ignore, *request.frozen, *request.only)
    for name in (*names, *lora, *request.handles, *request.trainer_hosts, *gpus, *request.prepared, *patterns):
        if len(name) > _MAX_NAME_LENGTH:
            raise _invalid_request(f"a name of {len(name):,} characters is too long: {name[:40]!r}...")


def _invalid_section_reason(section: DeltaSection) -> str:
    if not 0 <= section.nbytes <= MAX_BUCKET_BYTES:
        return f"has {section.nbytes:,} bytes, and may have 0 to {MAX_BUCKET_BYTES:,}"
    if section.kind not in ("", *MEMORY_KINDS) or not 0 <= section.gpu < MAX_GPUS:
        return f"is in memory of kind {section.kind[:40]!r} on GPU {section.gpu}, which cannot exist"
    if not 0 <= section.address <= MAX_ADDRESS:
        return f"is at address {section.address:,}, which cannot exist"
    return ""


def _check_relay(request: DistributedUpdateWeightsReq, relay: Relay) -> None:
    if not 2 <= len(relay.engines) <= _MAX_ENGINES or not 0 <= relay.own < len(relay.engines):
        raise _invalid_request(f"it is for engine {relay.own} of {len(relay.engines)}, of 2 to {_MAX_ENGINES:,}")
    if not 1 <= relay.update <= MAX_UPDATE:
        raise _invalid_request(f"the update number {relay.update} of all engines is not from 1 to {MAX_UPDATE:,}")
    if any(len(name) > _MAX_NAME_LENGTH for name in relay.engines):
        raise _invalid_request(f"the name of an engine has more than {_MAX_NAME_LENGTH:,} characters")
    if request.transport != "nixl" or request.staged or request.lora is not None:
        raise _invalid_request("engines pass on live weights, by transport='nixl', and no others")


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
    if any(len(name) > _MAX_NAME_LENGTH for name in (command.transfer, *command.read_plans)):
        raise _invalid_command(f"a name has more than {_MAX_NAME_LENGTH:,} characters")
    if not _is_timeout(command.timeout_s):
        raise _invalid_command(f"timeout_s={command.timeout_s} is not above 0 and at most {MAX_TIMEOUT_S:.0f}")


def _texts(device: RankDevice) -> tuple[str, ...]:
    return device.uuid, device.allocator, *device.visible, *device.nccl, *device.nccl.values()


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


def _is_timeout(seconds: float) -> bool:
    return math.isfinite(seconds) and 0 < seconds <= MAX_TIMEOUT_S


def _invalid_request(why: str) -> Mismatch:
    return Mismatch(f"invalid update request: {why}. Send it with sglang_reshard.WeightSender")


def _invalid_command(why: str) -> Mismatch:
    return Mismatch(
        f"invalid PrepareSend command of engine rank 0: {why}. Do both sides run the same version of sglang-reshard?"
    )
