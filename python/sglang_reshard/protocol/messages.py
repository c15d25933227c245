"""Defines every message that crosses a process boundary, and its encoding: typed msgspec structs, never a pickle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypedDict, TypeVar, cast

import msgspec
from msgspec import Meta

from sglang_reshard import errors
from sglang_reshard.control import Address
from sglang_reshard.errors import Mismatch, ReshardError
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.layout.decoders import msgpack_decoder
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.observability.report import RankReport, UpdateReport
from sglang_reshard.protocol.publication import MOST_PUBLICATION

T = TypeVar("T")
logger = get_logger(__name__)

DEFAULT_BUCKET_BYTES = 64 * 1024 * 1024
DEFAULT_TIMEOUT_S = 300.0
MAX_BUCKET_BYTES = 1 << 40
MAX_NAME_LENGTH = 4096  # characters of a name, a hash, a host
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 1e-3, 1e9
_MOST_PATTERNS, _MOST_EXTRA_BYTES = 1 << 16, 1 << 24

# Decoding refuses values out of these ranges, and names the field.
Text = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]
Texts = Annotated[tuple[Text, ...], Meta(max_length=_MOST_PATTERNS)]
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]  # fits into 64 bits after an addition
Publication = Annotated[int, Meta(ge=0, le=MOST_PUBLICATION)]
BucketBytes = Annotated[int, Meta(ge=1, le=MAX_BUCKET_BYTES)]
Seconds = Annotated[float, Meta(ge=MIN_TIMEOUT_S, le=MAX_TIMEOUT_S)]
# Of a pull and a share: one engine waits for another, which nobody may have started.
PullSeconds = Annotated[float, Meta(ge=MIN_TIMEOUT_S, le=3600)]
Extra = Annotated[bytes, Meta(max_length=_MOST_EXTRA_BYTES)]  # what one route is asked, or offers
RankNumber = Annotated[int, Meta(ge=0, lt=1 << 16)]

WAITS = 8  # an update waits at most this many times, each time for up to `timeout_s`
Verify = Literal["off", "sample", "full"]
BY_VERSION: Literal["by_version"] = "by_version"
FlushCache = bool | Literal["by_version"]
PauseMode = Literal["abort", "retract", "in_place"]  # of SGLang's pause_generation
# What an engine rank executes: a whole update, a part of one, the other side of another engine's, or a question about
# SGLang's own.
Step = Literal["update", "stage", "staged", "commit", "share", "loaded"]


class LoraAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter whose tensors an update brings, as "NAME/TENSOR"; the only adapter of an update also as "TENSOR".

    name     under which requests ask for it, as `lora_path`
    config   PEFT's configuration of it, in JSON: r, lora_alpha, target_modules
    version  of these weights, for `GET /weights_info`; by default the update's weight_version
    lora_id  SGLang's; added by the engine's tokenizer manager
    """

    name: Text
    config: Text
    version: Text = ""
    lora_id: Text = ""


class DistributedUpdateWeightsReq(msgspec.Struct, frozen=True, kw_only=True):
    """Requests one update of the engine. It carries no tensor and no handle, only where to find them.

    address          of the session: engine ranks keep plans and open handles as long as it stays the same. It
                     contains the session's key, so a process that reads a request can join the session
    engine           number of the engine within the session
    update           number of the update within the session
    layout           content hash of the source layout in the session
    handles          content hash of each trainer rank's memory handles in the session
    trainer_hosts    identity of each trainer rank's host
    trainer_devices  each trainer rank's GPU; empty if no trainer rank has one
    prepared         the transfer that all trainer ranks are still prepared for, by `Prepare.transfer`; else empty
    weight_version   the engine's weight_version once all ranks have the weights; None leaves it unchanged
    transport        how the weights reach the engine ranks, see `routes`
    bucket_bytes     size of a bucket; a rank holds at most two
    timeout_s        seconds that any one wait of this update may last
    flush_cache      flush the cache of the old weights; "by_version": only requests that hold some of it keep it
    abort_all_requests   end running requests instead of waiting for them
    ignore           fnmatch patterns of names that no engine rank needs to read
    apart            name -> why it is not its embedding bit for bit, of tensors that no engine rank may read
    frozen, only     fnmatch patterns of weights that may stay as they are, see `trace.kept.MayStay`
    stock_changes    number of loads and releases of all weights other than by updates, since the engine's start
    stock_loaded     the last of these loaded weights. Both are added by the engine's tokenizer manager
    verify           compare checksums of the weights with the trainer's: "off", "sample" or "full"
    staged           receive into shadow weights, and commit them once all have arrived and been verified
    unmap_after      unmap the trainer ranks' memory at the end; the next update maps it again
    draft            update the draft models of speculative decoding, too
    lora             the adapters that are updated, all or none; empty for the model's own weights
    merged           names of the adapters that are merged into the model's own weights
    around           routes around the transport -> what each of them is asked, see `routes`
    offers           trainer rank -> engine rank -> what it can take instead of all weights; empty if it cannot
    publication      number of these weights, see `protocol.publication`; 0 if they have none
    package_version  of the sender
    protocol         of the sender; the engine's must be the same. 0 of a release that sends none
    traceparent      W3C context of the sender's span; empty without one
    """

    address: Address
    engine: Number = 0
    update: Number
    layout: Text
    handles: tuple[Text, ...]
    trainer_hosts: tuple[Text, ...]
    trainer_devices: tuple[RankGpuInfo, ...] = ()
    prepared: Text = ""
    weight_version: Text | None = None
    transport: Text = "auto"
    bucket_bytes: BucketBytes = DEFAULT_BUCKET_BYTES
    timeout_s: Seconds = DEFAULT_TIMEOUT_S
    flush_cache: FlushCache = True
    abort_all_requests: bool = False
    ignore: Texts = ()
    apart: Annotated[dict[Text, Text], Meta(max_length=_MOST_PATTERNS)] = {}
    frozen: Texts = ()
    only: Texts = ()
    stock_changes: Number = 0
    stock_loaded: bool = True
    verify: Verify = "off"
    staged: bool = False
    unmap_after: bool = False
    draft: bool = True
    lora: Annotated[tuple[LoraAdapter, ...], Meta(max_length=_MOST_PATTERNS)] = ()
    merged: Texts = ()
    around: Annotated[dict[Text, Extra], Meta(max_length=16)] = {}
    offers: tuple[dict[RankNumber, Extra], ...] = ()
    publication: Publication = 0
    package_version: Text = ""
    protocol: Number = 0
    traceparent: Text = ""

    def name(self) -> str:
        return f"update {self.update} of session {self.address.session}"

    def labels(self) -> dict[str, Any]:
        """Returns the attributes that log lines and spans of this update have."""
        return {"session": self.address.session, "update": self.update, "version": self.weight_version or ""}


class ShareWeightsReq(msgspec.Struct, frozen=True, kw_only=True):
    """Asks an engine to pass its live weights on to another one. Its engine ranks are the trainer ranks of that update.

    package_version, protocol, transport, bucket_bytes, timeout_s, verify   as in `DistributedUpdateWeightsReq`
    address         of the control server over which the two meet; set by the engine that shares
    weight_version  of the live weights; set by the engine that shares
    """

    package_version: Text
    protocol: Number = 0
    transport: Text = "auto"
    bucket_bytes: BucketBytes = DEFAULT_BUCKET_BYTES
    timeout_s: PullSeconds = DEFAULT_TIMEOUT_S
    verify: Verify = "full"
    address: Address | None = None
    weight_version: Text | None = None


class StockLoadReq(msgspec.Struct, frozen=True, kw_only=True):
    """Asks an engine's schedulers what SGLang's own update from disk, which has just ended, has done to the weights.

    complete   also whether it has filled every parameter
    timeout_s  see `DistributedUpdateWeightsReq`
    """

    complete: bool
    timeout_s: float = DEFAULT_TIMEOUT_S


class SharedWeights(msgspec.Struct, frozen=True):
    """Answers `ShareWeightsReq`.

    address  of the control server, at which requests wait for the other engine, see `extras.request_mail`
    version  of the weights that are shared
    digest   of these, where the update that brought them had verify="full"; else empty
    dtype    the engine's, "bfloat16": digests of engines of different dtypes differ
    publication  of these, see `protocol.publication`
    """

    address: Address
    version: Text
    digest: Annotated[str, Meta(pattern=r"^([0-9a-f]{16})?\Z")]
    dtype: Text
    publication: Publication = 0


class LoadSnapshotReq(msgspec.Struct, frozen=True, kw_only=True):
    """Lets a server load a snapshot: each engine rank reads its part of the snapshot's files.

    path            absolute path of the snapshot's folder, which all of the engine's hosts see
    version         the snapshot's name, the engine's weight_version from then on
    publication     of the snapshot, see `protocol.publication`
    allow_rollback  load it also if the server holds a later publication
    staged          receive apart from the live weights, while requests are served; where there is no memory for that,
                    boxes are read twice: to compare them, and into the live weights

    Other fields are as in `DistributedUpdateWeightsReq`.
    """

    path: Annotated[str, Meta(max_length=MAX_NAME_LENGTH, pattern=r"^[^\0]*\Z")]
    version: Text
    publication: Publication
    allow_rollback: bool = False
    staged: bool = True
    bucket_bytes: BucketBytes = DEFAULT_BUCKET_BYTES
    timeout_s: Seconds = DEFAULT_TIMEOUT_S
    flush_cache: FlushCache = True
    abort_all_requests: bool = False
    ignore: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    draft: bool = True


class LoadGiven(TypedDict, total=False):
    """The fields of `LoadSnapshotReq` that are given by name, but those of the snapshot."""

    staged: bool
    bucket_bytes: int
    timeout_s: float
    flush_cache: FlushCache
    abort_all_requests: bool
    ignore: Sequence[str]
    frozen: Sequence[str]
    only: Sequence[str]
    draft: bool


class LoadSnapshotOutput(msgspec.Struct, frozen=True):
    """Answers `LoadSnapshotReq`.

    success     False where the server holds later weights, or gets them just now
    message     why not; after a success a note, such as names that the engine does not use
    read_bytes  that all engine ranks have read of the snapshot's files
    """

    success: bool
    message: str = ""
    read_bytes: int = 0


class PullWeightsReq(msgspec.Struct, frozen=True, kw_only=True):
    """Asks an engine to take the live weights of the one at `url`, whose keys are `api_key` and `admin_api_key`.

    url            of the other server, as this one reaches it: http://host:port
    api_key        its --api-key, if it has one
    admin_api_key  its --admin-api-key, if it has one
    verify         "full" computes the digest of the arrived weights, and compares it with that of the other engine's
                   last update, if that is known

    Other fields are as in `DistributedUpdateWeightsReq`.
    """

    url: Text
    api_key: Text = ""
    admin_api_key: Text = ""
    transport: Text = "auto"
    bucket_bytes: BucketBytes = DEFAULT_BUCKET_BYTES
    timeout_s: PullSeconds = DEFAULT_TIMEOUT_S
    verify: Verify = "full"


class PullGiven(TypedDict, total=False):
    """The fields of `PullWeightsReq` that are given by name, but the URL and the keys."""

    transport: str
    bucket_bytes: int
    timeout_s: float
    verify: Verify


class DistributedUpdateWeightsOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Reports the outcome of an update.

    success       all engine ranks have the new weights
    message       why it failed, and what to do; after a success a note, such as names that the engine does not use
    torn          the weights are partly written; only a successful update restores them
    under_way     between the engine's processes only: the step that was asked about is still running
    transport     that moved the weights; empty if none was chosen
    transport_reason   why this one
    digest        of all weights, see `landings.checked.whole_model`; empty unless verify="full" compared them
    tensors       number of tensors in the source layout
    source_bytes  bytes of these
    ranks         a report of each engine rank
    taken         engine ranks took the trainer ranks' offers instead of all weights
    detour        see `Traffic`
    kept          names of the engine's parameters that were left as they are, and of parts, see `trace.kept.part_of`
    kept_versions  weight_version -> names of the kept parameters that have it, and "draft.*" of draft models that were
                  left; added by the engine's tokenizer manager
    phase         of the failed update, see `engine.context.Phase`; empty if it succeeded, or failed before
    """

    success: bool
    message: str
    torn: bool = False
    under_way: bool = False
    transport: str = ""
    transport_reason: str = ""
    digest: str = ""
    tensors: int = 0
    source_bytes: int = 0
    ranks: tuple[RankReport, ...] = ()
    taken: bool = False
    detour: str = ""
    kept: tuple[str, ...] = ()
    kept_versions: dict[str, tuple[str, ...]] = {}
    phase: str = ""


_ERRORS = {k.__name__: k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, ReshardError)}


class Failure(msgspec.Struct, frozen=True):
    """An exception that is sent to another process; `kind` is the name of its class in `errors`, or of a base class."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        if isinstance(error, ReshardError):
            return cls(next(k.__name__ for k in type(error).__mro__ if k in _ERRORS.values()), str(error))
        return cls("ReshardError", f"{type(error).__name__}: {error}")

    @classmethod
    def on(cls, trainer_rank: int, error: BaseException) -> Failure:
        """Returns a failure whose message names a trainer rank: the given one, unless it names one already.

        Logs an error that is not a ReshardError.
        """
        if not isinstance(error, ReshardError):
            logger.error("trainer rank %d failed", trainer_rank, exc_info=error)
        found = cls.of(error)
        named = found.message.startswith("trainer rank")
        return found if named else cls(found.kind, f"trainer rank {trainer_rank}: {found.message}")

    def error(self) -> ReshardError:
        return _ERRORS.get(self.kind, ReshardError)(self.message)


class Outcome(msgspec.Struct, Generic[T], frozen=True):
    """A rank's message to others, or the exception that replaces it."""

    value: T | None = None
    failure: Failure | None = None

    def result(self) -> T:
        """Returns the value. Raises the exception."""
        if self.failure is not None:
            raise self.failure.error()
        return cast(T, self.value)

    def value_or_error(self) -> T | ReshardError:
        return cast(T, self.value) if self.failure is None else self.failure.error()


class TrainerStatus(msgspec.Struct, frozen=True):
    """Published by each trainer rank at the start of an update, as an `Outcome`: it may be unable to participate.

    prepared  engine -> `Prepare.transfer` of the transfer that it is still prepared for, if there is one
    device    its GPU
    offers    engine -> engine rank -> what it can take instead of all weights, for engines that can
    heads     name -> why it is not its embedding bit for bit, empty if it is; see `trainer.tied_heads`
    """

    host: str
    layout: str
    handles: str
    prepared: dict[int, str] = {}
    device: RankGpuInfo = RankGpuInfo()
    offers: dict[int, dict[int, bytes]] = {}
    heads: dict[str, str] = {}


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Command of engine rank 0: make this rank's end of a route, and report ready.

    transfer   names what is prepared; a later `Start` refers to it
    route      name of the end, see `routes.trainer_end`
    message    what the end is told, encoded
    timeout_s  seconds that any one wait may last
    """

    transfer: Text
    route: Text
    message: bytes
    timeout_s: Seconds

    def asked(self, kind: type[T]) -> T:
        """Returns the message for the end. Raises Mismatch for another kind."""
        return decode(self.message, kind)


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Command of engine rank 0, once all trainer ranks have reported ready: connect to the engine ranks."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Command of engine rank 0: start the prepared `transfer`; with `taken`, what was offered instead."""

    transfer: str
    taken: bool = False


class Question(msgspec.Struct, frozen=True, tag="question"):
    """Command of engine rank 0: answer what a landing asks, see `encode`. Engines that ask the same get one answer."""

    message: bytes


Command = Prepare | Connect | Start | Question


class EngineCommand(msgspec.Struct, frozen=True, tag="engine_command"):
    """A command of one engine to all trainer ranks."""

    engine: int
    command: Command


class UpdateResults(msgspec.Struct, frozen=True, tag="update_results"):
    """Sent by trainer rank 0 to all trainer ranks: the update has ended for all engines, by their numbers."""

    of: dict[int, Outcome[UpdateReport]]


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=as_list)


def as_list(value: Any) -> Any:
    """Encodes tensors and arrays in an engine's output as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotImplementedError(f"objects of type {type(value).__name__} cannot be sent in a message")


def decode(data: bytes, kind: type[T]) -> T:
    """Raises Mismatch for data that is not a valid message of type `kind`."""
    try:
        return msgpack_decoder(kind).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        name = getattr(kind, "__name__", "Command")  # the only union of messages
        raise Mismatch(
            f"invalid {name} message: {error}. Trainer and engine must run the same version of sglang-reshard"
        ) from error
