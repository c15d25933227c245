"""Validates the fields of requests: of an update, a pull, a share, a load of a snapshot, and of a probe's outcome.

The process that receives a request validates all of it before it asks another one, so that no process downstream can
fail on a value that it cannot send on. All checks raise Mismatch.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from typing import get_args

from sglang_reshard.control import Address
from sglang_reshard.errors import Mismatch
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.nearest import not_one_of
from sglang_reshard.observability.probe_report import ProbeSummary
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsReq,
    LoadSnapshotReq,
    Prepare,
    PullWeightsReq,
    SharedWeights,
    ShareWeightsReq,
    Verify,
)
from sglang_reshard.protocol.publication import MOST_PUBLICATION
from sglang_reshard.protocol.validation.layouts import MAX_TRAINER_RANKS
from sglang_reshard.route_table import FROM_FILES, ROUTES

MAX_BUCKET_BYTES = 1 << 40
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 1e-3, 1e9
MAX_UPDATE = "SGLANG_RESHARD_MAX_UPDATE_S"  # of an engine: seconds that a whole update may take there
_DEFAULT_MAX_UPDATE_S = 3600.0
MAX_PULL_TIMEOUT_S = 3600.0  # of a pull and a share: one engine waits for another, which nobody may have started
MAX_NAME_LENGTH = 4096  # characters of a name, a hash, a host
_MAX_NUMBER = (1 << 62) - 1  # of an update, an engine, an address in memory: fits into 64 bits after an addition
_MAX_ENGINE_RANKS = 1 << 16
_MAX_ROUTES, _MAX_ROUTE_BYTES = 16, 1 << 24  # around a transport, and of what one of them is asked
_MAX_PATTERNS = 1 << 16
_MAX_GPUS = 1 << 10  # of one host
_MAX_SESSION_LENGTH = 512  # characters; names of keys and scopes are added to it
_MAX_HOST_LENGTH = 255
_KEY_LENGTH, _DIGEST_LENGTH = 64, 16  # hexadecimal digits
_HEXADECIMAL = frozenset("0123456789abcdef")


def check_transport(name: str, *, of_request: bool = False) -> None:
    """Raises Mismatch for the name of a transport that does not exist, or that no user can ask for."""
    if name != "auto" and name not in ROUTES and not (of_request and name in FROM_FILES):
        raise Mismatch(not_one_of(f"transport {name[:80]!r}", name, ("auto", *ROUTES)))


def max_update_s() -> float:
    """Returns this engine's limit of an update's whole time. Raises Mismatch if it is set to anything but seconds."""
    given = os.environ.get(MAX_UPDATE)
    if given is None:
        return _DEFAULT_MAX_UPDATE_S
    with contextlib.suppress(ValueError):
        if MIN_TIMEOUT_S <= float(given) <= MAX_TIMEOUT_S:
            return float(given)
    raise Mismatch(
        f"{MAX_UPDATE}={given[:80]!r} in this engine's environment is not a number of seconds; correct or unset it"
    )


def check_request(request: DistributedUpdateWeightsReq) -> None:
    """Raises Mismatch for a request that no sender makes, or that may take longer than this engine's limit."""
    invalid = _invalid_request
    if request.timeout_s > (limit_s := max_update_s()):
        raise Mismatch(
            f"timeout_s={request.timeout_s} exceeds this engine's limit of {limit_s:g} seconds for a whole update. "
            f"Pass a shorter timeout_s to the sender, or start the engine with a higher {MAX_UPDATE}"
        )
    ranks, devices, prepared = len(request.trainer_hosts), len(request.trainer_devices), len(request.prepared)
    equal = len(request.handles) == ranks and {devices, prepared} <= {0, ranks}
    if not 1 <= ranks <= MAX_TRAINER_RANKS or not equal:
        raise invalid(
            f"it has {ranks} trainer hosts, {len(request.handles)} memory handles, {devices} trainer devices and "
            f"{prepared} prepared transfers; all must have one entry per trainer rank, from 1 to {MAX_TRAINER_RANKS:,}"
        )
    _check_address(request.address, invalid)
    for name, number in (("update", request.update), ("engine", request.engine), ("stock", request.stock_changes)):
        _check_number(name, number, invalid)
    _check_publication(request.publication, invalid)
    _check_options(request, invalid, MAX_TIMEOUT_S)
    if len(request.offers) not in (0, ranks):
        raise invalid(f"offers has {len(request.offers)} entries, expected 0 or {ranks} (one per trainer rank)")
    if len(request.around) > _MAX_ROUTES or max(map(len, request.around.values()), default=0) > _MAX_ROUTE_BYTES:
        raise invalid(
            f"around has {len(request.around):,} routes, or one of them exceeds the size limit; at most {_MAX_ROUTES} "
            f"routes of {_MAX_ROUTE_BYTES:,} bytes are allowed"
        )
    for of_ranks in request.offers:
        if any(not 0 <= e < _MAX_ENGINE_RANKS or len(o) > _MAX_ROUTE_BYTES for e, o in of_ranks.items()):
            raise invalid(
                f"an offer names an engine rank outside 0 to {_MAX_ENGINE_RANKS - 1:,}, or exceeds "
                f"{_MAX_ROUTE_BYTES:,} bytes"
            )
    of_names = (request.ignore, request.frozen, request.only, request.merged)
    patterns: tuple[Collection[str], ...] = (*of_names, request.apart)
    if (most := max(map(len, patterns))) > _MAX_PATTERNS:
        raise invalid(f"it has {most:,} names or patterns of one kind; at most {_MAX_PATTERNS:,} are allowed")
    names = (request.layout, request.weight_version or "", request.package_version, request.traceparent)
    lora = (request.lora.name, request.lora.config, request.lora.lora_id) if request.lora is not None else ()
    gpus = [text for device in request.trainer_devices for text in _texts(device)]
    _check_lengths((*names, *lora, *request.handles, *request.trainer_hosts, *gpus, *request.prepared), invalid)
    _check_lengths((*request.around, *request.apart, *request.apart.values(), *chain(*of_names)), invalid)


def check_prepare(command: Prepare) -> None:
    """Raises Mismatch for a command that no engine sends. The route checks its content."""
    _check_lengths((command.transfer, command.route), _invalid_command)
    if not MIN_TIMEOUT_S <= command.timeout_s <= MAX_TIMEOUT_S:
        raise _invalid_command(
            f"timeout_s={command.timeout_s} is out of range ({MIN_TIMEOUT_S} to {MAX_TIMEOUT_S:.0f} seconds)"
        )


def check_pull_request(request: PullWeightsReq) -> None:
    """Raises Mismatch for a request whose values no server can use. The URL is not requested."""
    invalid = _invalid_pull
    _check_options(request, invalid, MAX_PULL_TIMEOUT_S)
    _check_lengths((request.url, request.api_key, request.admin_api_key), invalid)
    if any(not (key.isascii() and key.isprintable()) for key in (request.api_key, request.admin_api_key)):
        raise invalid("a key has characters that an HTTP header cannot carry")


def check_share_request(request: ShareWeightsReq) -> None:
    """Raises Mismatch for a request that no server makes."""
    invalid = _invalid_share
    _check_options(request, invalid, MAX_PULL_TIMEOUT_S)
    _check_lengths((request.package_version, request.weight_version or ""), invalid)
    if request.address is not None:
        _check_address(request.address, invalid)


def check_load_request(request: LoadSnapshotReq) -> None:
    """Raises Mismatch for a request that no follower makes. The path is not opened."""
    _check_lengths((request.path, request.version), _invalid_load)
    _check_publication(request.publication, _invalid_load)
    _check_bounds(request, _invalid_load, max_update_s())
    if "\0" in request.path:
        raise _invalid_load("its path has a null character")


def check_shared_weights(shared: SharedWeights) -> None:
    """Raises Mismatch for an answer that no server gives."""
    _check_address(shared.address, _invalid_share)
    _check_lengths((shared.version, shared.dtype), _invalid_share)
    _check_publication(shared.publication, _invalid_share)
    if len(shared.digest) not in (0, _DIGEST_LENGTH) or not _HEXADECIMAL.issuperset(shared.digest):
        raise _invalid_share(f"the digest is not {_DIGEST_LENGTH} hexadecimal digits")


def check_probe_summary(summary: ProbeSummary) -> None:
    """Raises Mismatch for an outcome that no probe has."""
    numbers = (summary.mean_difference, summary.largest_difference, summary.seconds)
    if not all(number is None or (math.isfinite(number) and number >= 0) for number in numbers):
        raise Mismatch(f"invalid probe: its differences and seconds are {numbers}; all must be finite and not negative")


_Invalid = Callable[[str], Mismatch]


def _check_options(
    request: DistributedUpdateWeightsReq | PullWeightsReq | ShareWeightsReq, invalid: _Invalid, longest_s: float
) -> None:
    _check_lengths((request.transport,), invalid)
    if not isinstance(request, PullWeightsReq):
        _check_number("protocol", request.protocol, invalid)
    check_transport(request.transport, of_request=isinstance(request, DistributedUpdateWeightsReq))
    if request.verify not in get_args(Verify):  # of a request that was decoded it is
        raise invalid(not_one_of(f"verify={request.verify!r}", request.verify, get_args(Verify)))
    _check_bounds(request, invalid, longest_s)


def _check_bounds(
    request: DistributedUpdateWeightsReq | PullWeightsReq | ShareWeightsReq | LoadSnapshotReq,
    invalid: _Invalid,
    longest_s: float,
) -> None:
    if not 1 <= request.bucket_bytes <= MAX_BUCKET_BYTES:
        raise invalid(f"bucket_bytes={_shown(request.bucket_bytes)} is out of range (1 to {MAX_BUCKET_BYTES:,})")
    if not MIN_TIMEOUT_S <= request.timeout_s <= longest_s:  # false for NaN, too
        raise invalid(f"timeout_s={request.timeout_s} is out of range ({MIN_TIMEOUT_S} to {longest_s:.0f} seconds)")


def _check_number(name: str, number: int, invalid: _Invalid) -> None:
    if not 0 <= number <= _MAX_NUMBER:
        raise invalid(f"the {name} number {_shown(number)} is out of range (0 to {_MAX_NUMBER:,})")


def _check_publication(publication: int, invalid: _Invalid) -> None:
    if not 0 <= publication <= MOST_PUBLICATION:
        raise invalid(f"the publication number {_shown(publication)} is out of range (0 to {MOST_PUBLICATION:,})")


def _check_address(address: Address, invalid: _Invalid) -> None:
    if not len(address.session) <= _MAX_SESSION_LENGTH or not 1 <= len(address.host) <= _MAX_HOST_LENGTH:
        raise invalid(
            f"its address has a session name of {len(address.session):,} characters and a host of "
            f"{len(address.host):,}; at most {_MAX_SESSION_LENGTH} and {_MAX_HOST_LENGTH} are allowed"
        )
    if "\0" in address.host:
        raise invalid("the host of its address has a null character")
    if len(address.key) != _KEY_LENGTH or not _HEXADECIMAL.issuperset(address.key):
        raise invalid(f"the key of its address is not {_KEY_LENGTH} hexadecimal digits")


def _texts(device: RankGpuInfo) -> tuple[str, ...]:
    if max(len(device.visible), len(device.nccl)) > _MAX_GPUS:
        raise _invalid_request(f"a trainer device lists more than {_MAX_GPUS:,} visible GPUs or NCCL settings")
    return device.uuid, device.allocator, device.fabric, *device.visible, *device.nccl, *device.nccl.values()


def _check_lengths(texts: Iterable[str], invalid: _Invalid) -> None:
    for text in texts:
        if len(text) > MAX_NAME_LENGTH:
            raise invalid(f"a text of {len(text):,} characters is too long: {text[:40]!r}...")


def _shown(number: int) -> str:
    """Returns a number for an error. Python refuses to print one of thousands of digits."""
    return f"{number:,}" if number.bit_length() <= 128 else f"of {number.bit_length():,} bits"


def _invalid_request(why: str) -> Mismatch:
    return Mismatch(f"invalid update request: {why}. Send it with sglang_reshard.WeightSender")


def _invalid_command(why: str) -> Mismatch:
    return Mismatch(
        f"invalid Prepare command of engine rank 0: {why}. Do both sides run the same version of sglang-reshard?"
    )


def _invalid_pull(why: str) -> Mismatch:
    return Mismatch(f"invalid pull request: {why}. Send it with sglang_reshard.RemoteEngine or `sglang-reshard pull`")


def _invalid_load(why: str) -> Mismatch:
    return Mismatch(f"invalid request to load a snapshot: {why}. Send it with `sglang-reshard follow`")


def _invalid_share(why: str) -> Mismatch:
    return Mismatch(f"invalid share request: {why}. Do both servers run the same version of sglang-reshard?")
