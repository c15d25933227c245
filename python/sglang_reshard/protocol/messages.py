"""Everything that crosses a process boundary, and how: msgspec, typed, never a pickle."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from sglang_reshard import errors
from sglang_reshard.control import Address
from sglang_reshard.digest.selection import Selection
from sglang_reshard.errors import Mismatch, ReshardError
from sglang_reshard.observability.report import RankReport, UpdateReport

T = TypeVar("T")

DEFAULT_BUCKET_BYTES = 64 * 1024 * 1024
DEFAULT_TIMEOUT_S = 300.0
WAITS = 8  # an update waits at most this many times, each time for up to `timeout_s`
Verify = Literal["off", "sample", "full"]
PauseMode = Literal["abort", "retract", "in_place"]  # of SGLang's pause_generation
Step = Literal["update", "stage", "staged", "commit"]  # what an engine's processes do of an update: all, or a part


class DistributedUpdateWeightsReq(msgspec.Struct, frozen=True, kw_only=True):
    """The one request of an update. It carries no tensor and no handle, only where to find them.

    address         of the session: engine ranks keep plans and open handles as long as it stays the same. It has the
                    session's key in it, so whoever can read a request can take part in the session
    update          number of the update within the session
    layout          content hash of the source layout in the session
    handles         content hash of each trainer rank's memory handles in the session
    weight_version  what the engine calls the weights once all ranks have them; None keeps its name
    routes          what each trainer rank still has ready to send, by the route of the `PrepareSend` it was made for
    bucket_bytes    size of a bucket; a rank holds at most two
    timeout_s       seconds that any one wait of this update may last
    ignore          names that no engine rank need have a use for, as patterns of fnmatch
    verify          compare digests of what has arrived with the trainer's own: "off", "sample" or "full"
    staged          keep the weights apart until they have all arrived and been verified; takes as much memory again
    let_go          unmap the trainer ranks' memory at the end, and map it again in the next update
    package_version of the sender; the engine's must be the same
    traceparent     the sender's span, see `spans`; empty where it has none
    """

    address: Address
    update: int
    layout: str
    handles: tuple[str, ...]
    trainer_hosts: tuple[str, ...]
    routes: tuple[str, ...] = ()
    weight_version: str | None = None
    transport: str = "auto"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    timeout_s: float = DEFAULT_TIMEOUT_S
    flush_cache: bool = True
    abort_all_requests: bool = False
    ignore: tuple[str, ...] = ()
    verify: Verify = "off"
    staged: bool = False
    let_go: bool = False
    package_version: str = ""
    traceparent: str = ""

    def whose(self) -> str:
        return f"update {self.update} of session {self.address.session}"

    def named(self) -> dict[str, Any]:
        """What log lines and spans say of this update."""
        return {"session": self.address.session, "update": self.update, "version": self.weight_version or ""}


class DistributedUpdateWeightsOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's answer.

    torn       weights were partly written: only a successful update heals that
    under_way  between the engine's processes: what was asked about goes on still
    phase      in which it failed, see `course.PHASES`; empty where it did not, or before the first
    """

    success: bool
    message: str
    torn: bool = False
    under_way: bool = False
    transport: str = ""
    transport_reason: str = ""
    predicted_seconds: float = 0.0  # of the move, by the cost model
    digest: str = ""  # of all weights, see `digest.whole`, where verify="full" has compared them
    tensors: int = 0  # of the source layout, and their bytes
    source_bytes: int = 0
    read_bytes: dict[int, int] = {}  # trainer rank -> bytes that engine ranks get out of its memory
    ranks: tuple[RankReport, ...] = ()
    phase: str = ""


class Failure(msgspec.Struct, frozen=True):
    """An error on its way to another process; `kind` is the name of its class in `errors`."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        if isinstance(error, ReshardError):
            return cls(type(error).__name__, str(error))
        return cls("ReshardError", f"{type(error).__name__}: {error}")

    def error(self) -> ReshardError:
        kind = getattr(errors, self.kind, ReshardError)
        return kind(self.message)


class TrainerStatus(msgspec.Struct, frozen=True):
    """What each trainer rank announces at the start of an update.

    route    of the last `PrepareSend`, if what this rank sends is ready still; else empty
    failure  why it cannot take part
    """

    host: str
    layout: str
    handles: str
    failure: Failure | None = None
    route: str = ""


class PrepareSend(msgspec.Struct, frozen=True, tag="connect"):
    """Engine rank 0 to all trainer ranks: make ready to send, and say whether you are.

    route      names this preparation; a later `StartTransfer` is for it
    intakes    the digest of each engine rank's intake, under which its orders are in the session
    shares     bytes that each link carries in one round, [trainer ranks, engine ranks]; 0 where nothing is sent
    backend    "gloo" or "nccl"
    timeout_s  seconds that any one wait may last
    """

    route: str
    intakes: tuple[str, ...]
    shares: tuple[tuple[int, ...], ...]
    backend: str
    timeout_s: float

    def members(self) -> tuple[int, ...]:
        """Who sends or receives anything: trainer ranks, then engine ranks, numbered through."""
        senders = [t for t, row in enumerate(self.shares) if any(row)]
        receivers = [e for e, column in enumerate(zip(*self.shares, strict=True)) if any(column)]
        return (*senders, *(len(self.shares) + e for e in receivers))


class ConnectPeers(msgspec.Struct, frozen=True, tag="join"):
    """Engine rank 0 to all trainer ranks: all are ready; connect."""


class StartTransfer(msgspec.Struct, frozen=True, tag="move"):
    """Engine rank 0 to all trainer ranks: send."""

    route: str


class RequestChecksums(msgspec.Struct, frozen=True, tag="vouch"):
    """Engine rank 0 to all trainer ranks: say what the digests of the engine ranks' weights must be.

    claims     where each engine rank's claims are in the session
    selection  which elements are looked at
    """

    claims: tuple[str, ...]
    selection: Selection


class UpdateResult(msgspec.Struct, frozen=True, tag="done"):
    """Trainer rank 0 to the others: how the update ended. One of the two is None."""

    report: UpdateReport | None
    failure: Failure | None


Command = PrepareSend | ConnectPeers | StartTransfer | RequestChecksums | UpdateResult


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=as_list)


def as_list(value: Any) -> Any:
    """Tensors and arrays in an engine's output travel as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def decode(data: bytes, kind: type[T]) -> T:
    """Raises Mismatch for what is no such message."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Mismatch(
            f"what came is no {getattr(kind, '__name__', kind)}: {error}; trainer and engine must run the same version "
            "of sglang-reshard"
        ) from error
