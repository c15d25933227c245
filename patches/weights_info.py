"""Records which weights are live in the tokenizer manager, for `GET /weights_info`.

    output = weights_info.record(manager, request, output)    # after a successful update, inside its lock
    weights_info.current(manager)
    weights_info.under_way(manager)                  # what an update in progress says to another one

The record is cleared when anything else writes or releases weights, and the versions of parameters with it when
anything else writes. That waits while other engines take the weights
(`weights_sharing`), and so does an update, but not for long: a write comes before a pull.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sglang_reshard.errors import EngineRefused
from sglang_reshard.landings.checked.whole_model import with_versions
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.patches import sglang_versions, sound_weights
from sglang_reshard.patches.attached import attached
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.protocol.weights_info import LayoutInfo, WeightsInfo
from sglang_reshard.trace.kept import kept_versions
from sglang_reshard.version import PROTOCOL, __version__

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = get_logger(__name__)
_MAX_SHARES = 16
# An update waits for another engine that reads the weights; seconds from when it begins to wait:
_BEGIN_S = 2.0  # until the first of the other's engine ranks takes part, which it can at once
_READ_S = 30.0  # until all of them have the weights
_END_S = 5.0  # until one that was ended has ended
_DRAFTS = "draft.*"


@dataclass
class Record:
    """Describes an engine's weights, and the update in progress."""

    running: str = ""  # describes the update in progress
    unanswered: str = ""  # likewise, while the schedulers have been asked to write and have not answered
    shares: dict[asyncio.Task[None], Share] = field(default_factory=dict)  # each shares them with another engine
    publication: int = 0  # the latest that the engine holds or has held, see `protocol.publication`
    update: tuple[DistributedUpdateWeightsReq, DistributedUpdateWeightsOutput] | None = None  # that wrote them
    versions: dict[str, str] = field(default_factory=dict)  # of parameters or parts, where it is not the others'
    others: str = ""  # version of the others; empty where that is the engine's weight_version
    whole_load: bool = False  # SGLang's last load from disk has filled every parameter of all engine ranks
    merged: tuple[str, ...] = ()  # LoRA adapters that an update has merged into weights that may still be live
    adapters: dict[str, str] = field(default_factory=dict)  # SGLang's lora_id -> version of the update that brought it
    unmerged: tuple[str, ...] = ()  # parameters that the update has left which merged these


def of(manager: TokenizerManager) -> Record:
    return attached(manager, Record)


def record(
    manager: TokenizerManager, request: DistributedUpdateWeightsReq, output: DistributedUpdateWeightsOutput
) -> DistributedUpdateWeightsOutput:
    """Records a successful update as the origin of the live weights, before SGLang's weight_version changes.

    Returns the output with the versions of the parameters that the update has left, which its digest covers.
    """
    live = of(manager)
    now = live.others or str(sglang_versions.weight_version(manager) or "")
    has_drafts = bool(getattr(manager.server_args, "speculative_algorithm", None))
    left = [*output.kept, *([_DRAFTS] if has_drafts and not request.draft else [])]
    versions = kept_versions(left, live.versions, now)
    by_version = {v: tuple(n for n in versions if versions[n] == v) for v in dict.fromkeys(versions.values())}
    digest = with_versions(output.digest, versions)
    output = msgspec.structs.replace(output, kept_versions=by_version, digest=digest)
    live.versions, live.others, live.update = versions, "", (request, output)
    if request.merged or not set(output.kept) - set(live.unmerged):
        live.merged, live.unmerged = request.merged, output.kept
    live.publication = max(request.publication, live.publication)
    return output


@contextmanager
def running(manager: TokenizerManager, description: str, state: str = "running") -> Iterator[None]:
    """Around an update: others are refused with the description, and weights are not shared.

    state  "unanswered" around the wait for the schedulers that write: the client that has asked for it may be gone
    """
    setattr(of(manager), state, description)
    try:
        yield
    finally:
        setattr(of(manager), state, "")


def under_way(manager: TokenizerManager) -> str:
    """Returns why no other update can begin: a description of the one in progress; empty if there is none."""
    live = of(manager)
    return live.running or live.unanswered


class Share(NamedTuple):
    """Another engine that has been offered the live weights.

    has_begun  returns whether one of its engine ranks takes part
    end        ends it for all its ranks: none of them counts what it has read as weights
    """

    has_begun: Callable[[], bool]
    end: Callable[[], Awaitable[None]]


def add_share(manager: TokenizerManager, task: asyncio.Task[None], share: Share) -> None:
    """Registers what reads the live weights until `task` ends. Raises EngineRefused if there are too many already."""
    shares = of(manager).shares
    if len(shares) >= _MAX_SHARES:
        raise EngineRefused(
            f"{len(shares)} other engines take the live weights already; pull later, or from another engine"
        )
    shares[task] = share
    task.add_done_callback(lambda _: shares.pop(task))


async def unshared(manager: TokenizerManager) -> None:
    """Waits until no other engine reads the live weights. Ends those that have not begun soon, or take too long."""
    for seconds, has_time in ((_BEGIN_S, lambda share: share.has_begun()), (_READ_S - _BEGIN_S, lambda _: False)):
        if not (shares := dict(of(manager).shares)):
            return
        await asyncio.wait(shares, timeout=seconds)
        late = [share for task, share in shares.items() if not task.done() and not has_time(share)]
        for share in late:
            logger.warning("a pull of the live weights is ended, because an update of them waits for it")
            await share.end()
    if shares := dict(of(manager).shares):
        await asyncio.wait(shares, timeout=_END_S)


def clear(manager: TokenizerManager, since: str = "an update by SGLang") -> None:
    """Forgets which weights are live, once something may have written some of them: `since`.

    Which ones is unknown, so all have a version that no other weights have, until an update writes them.
    """
    live = of(manager)
    live.update, live.versions, live.others = None, {}, _unknown(since)
    live.merged = live.unmerged = ()


def _unknown(since: str) -> str:
    return f"unknown since {since} ({uuid.uuid4().hex[:16]})"


def current(manager: TokenizerManager) -> WeightsInfo:
    live, torn_reason = of(manager), sound_weights.torn(manager)
    loaded = manager.lora_registry.get_all_adapters() if manager.server_args.enable_lora else {}
    now = WeightsInfo(
        version=str(sglang_versions.weight_version(manager) or ""),
        package_version=__version__,
        protocol=PROTOCOL,
        torn=torn_reason,
        missing=sound_weights.missing(manager),
        under_way=bool(under_way(manager)),
        paused=bool(manager.is_pause),
        data_parallel_ranks=manager.server_args.dp_size,
        adapters={name: live.adapters.get(reference.lora_id, "") for name, reference in loaded.items()},
        publication=live.publication,
    )
    if live.update is None or torn_reason:
        return now
    request, output = live.update
    return msgspec.structs.replace(
        now,
        digest=output.digest,
        verified=request.verify,
        session=request.address.session,
        update=request.update,
        transport=output.transport,
        engine_ranks=len(output.ranks),
        layout=LayoutInfo(request.layout, len(request.trainer_hosts), output.tensors, output.source_bytes),
        kept=output.kept,
        kept_versions=output.kept_versions,
    )


Stock = Callable[..., Awaitable[Any]]


async def around_write(stock: Stock, manager: TokenizerManager, *args: Any, **kwargs: Any) -> Any:
    """Forgets the live weights before, because they change while it runs, and after, because an update may have ended
    in between. Parameters that it does not write keep their versions.
    """
    live = of(manager)
    live.update = None  # from now on they are not shared with another engine
    await unshared(manager)
    try:
        return await stock(manager, *args, **kwargs)
    finally:
        live.update = None


async def around_update(stock: Stock, manager: TokenizerManager, *args: Any, **kwargs: Any) -> Any:
    outcome = await _rewritten(stock, manager, *args, **kwargs)
    if _succeeded(outcome):
        sound_weights.written(manager)
    return outcome


async def around_load(stock: Stock, manager: TokenizerManager, *args: Any, **kwargs: Any) -> Any:
    """A load of all weights, see `disk_loads`, gives them the version that it names. A draft may not have found its own
    weights there.
    """
    live = of(manager)
    live.whole_load = False
    outcome = await _rewritten(stock, manager, *args, **kwargs)
    named = (args[0] if args else kwargs["obj"]).weight_version is not None
    if _succeeded(outcome) and named and live.whole_load:
        live.versions, live.others = {_DRAFTS: _unknown("a load from disk")}, ""
    return outcome


async def _rewritten(stock: Stock, manager: TokenizerManager, *args: Any, **kwargs: Any) -> Any:
    clear(manager)
    try:
        return await around_write(stock, manager, *args, **kwargs)
    finally:
        clear(manager)


def _succeeded(outcome: Any) -> bool:
    return isinstance(outcome, tuple) and bool(outcome) and outcome[0] is True  # and then a message


async def around_release(stock: Stock, manager: TokenizerManager, *args: Any, **kwargs: Any) -> Any:
    """Raises EngineRefused while an update runs: SGLang unmaps weights, which a staged update reads, without a wait."""
    tags = (args[0] if args else kwargs["obj"]).tags
    releases_weights = not tags or "weights" in tags  # no tags mean all
    if releases_weights:
        _check_releasable(manager)

        async def unless_updated(*args: Any, **kwargs: Any) -> Any:
            _check_releasable(manager)  # an update may have begun while other engines took the weights
            sound_weights.released(manager)
            return await stock(*args, **kwargs)

        return await around_write(unless_updated, manager, *args, **kwargs)
    return await stock(manager, *args, **kwargs)


def _check_releasable(manager: TokenizerManager) -> None:
    if busy := under_way(manager):
        raise EngineRefused(f"the weights cannot be released: {busy}")
