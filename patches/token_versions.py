"""sglang.srt.managers.schedule_batch: which weights have computed which of a request's output tokens.

    meta_info["weight_versions"]    [{"version": "6", "start": 0, "end": 41}, {"version": "7", "start": 41, "end": 90}]

SGLang reports these from 0.5.19 on: each request records how many output tokens it had when a version ended. Here older
versions do the same, and report it in the same format through `customized_info` of their requests.

With overlap scheduling, results of the last batch may be unprocessed when weights change. The old weights have computed
them, and SGLang counts their tokens for the new ones. Here requests of that batch keep the old version until its result
has been processed, with all versions of SGLang.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_reshard.patches import sglang_versions

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

_KEY = "weight_versions"
_UNPROCESSED = 1 << 62  # output tokens: more than any request has
_OPENAI = "sglang.srt.entrypoints.openai"
_version = ""  # of the live weights in this scheduler's process, and all of its requests; until 0.5.18
_requests: weakref.WeakSet[Req] = weakref.WeakSet()


@dataclass(frozen=True)
class Event:
    """`old_version` ended when a request had that many output tokens. These names are SGLang's."""

    old_version: str
    num_output_tokens: int


def record(scheduler: Scheduler, version: str | None) -> None:
    """Records that weights of this version are live from now on; None leaves the version unchanged."""
    global _version
    if sglang_versions.reports_token_versions(scheduler):
        scheduler.record_weight_version_change(new_version=version)
    elif version not in (None, _version):
        for request in _requests:
            if request.output_ids:
                request.weight_version_events.append(Event(_version, len(request.output_ids)))
        _keep_unprocessed(scheduler, _version)
        _version = version


def around_record(stock: Callable[..., None], scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    """Around the record of SGLang itself, from 0.5.19 on."""
    from sglang.srt.runtime_context import get_serving

    old = get_serving().weight_version
    stock(scheduler, *args, **kwargs)
    if get_serving().weight_version != old:
        _keep_unprocessed(scheduler, old)


def _keep_unprocessed(scheduler: Scheduler, old: str) -> None:
    """Wraps a method of `scheduler` while there are unprocessed results, so its loop runs without this otherwise."""
    queue = getattr(scheduler, "result_queue", ())  # only where scheduling overlaps
    for batch, _result in queue:
        for request in batch.reqs:
            request.weight_version_events.append(Event(old, _UNPROCESSED))
    if not queue or "process_batch_result" in vars(scheduler):
        return
    left, stock = len(queue), scheduler.process_batch_result

    def process(batch: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal left
        requests = list(batch.reqs)
        stock(batch, *args, **kwargs)
        for request in requests:
            events, tokens = request.weight_version_events, len(request.output_ids)
            ended = [Event(event.old_version, min(event.num_output_tokens, tokens)) for event in events]
            request.weight_version_events = ended if tokens else []
        left -= 1
        if not left:
            del scheduler.process_batch_result

    scheduler.process_batch_result = process


# -- until 0.5.18


def begin(_result: Any, scheduler: Scheduler, *_: Any, **__: Any) -> None:
    """Records SGLang's own updates, too: their requests have a `weight_version`."""
    global _version
    _version = scheduler.server_args.weight_version
    handlers = scheduler._request_dispatcher._mapping
    for kind, handler in list(handlers.items()):
        if "weight_version" in getattr(kind, "__annotations__", {}):
            handlers[kind] = functools.partial(_recorded, scheduler, handler)


def _recorded(scheduler: Scheduler, handler: Callable[[Any], Any], request: Any) -> Any:
    output = handler(request)
    if output.success:
        record(scheduler, request.weight_version)
    return output


def watch(_result: Any, request: Req, *_: Any, **__: Any) -> None:
    request.weight_version_events = []
    request.customized_info = {_KEY: _Spans(request)}
    _requests.add(request)


class _Spans:
    """Is sliced like a list of one value per output token. The slice of a finished request has its spans."""

    def __init__(self, request: Req) -> None:
        self._request = weakref.ref(request)  # which refers to this

    def __getitem__(self, unsent: slice) -> list[dict[str, Any]]:
        request = self._request()
        if request is None or not request.finished():
            return []
        return spans(request.weight_version_events, _version, unsent.stop)


def spans(events: Sequence[Event], version: str, tokens: int) -> list[dict[str, Any]]:
    """Returns which output tokens, from `start` to before `end`, each version has computed; `version` the last ones."""
    found: list[dict[str, Any]] = []
    for event in (*events, Event(version, tokens)):
        start, end = found[-1]["end"] if found else 0, min(event.num_output_tokens, tokens)
        if not found or (end > start and event.old_version != found[-1]["version"]):
            found.append({"version": event.old_version, "start": start, "end": end})
        found[-1]["end"] = max(start, end)
    return found


def extend(*_: Any, **__: Any) -> None:
    """Adds the spans to OpenAI answers of a server, whose modules only its own process has loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    for module, method in (
        ("serving_chat", "OpenAIServingChat._build_chat_response"),
        ("serving_completions", "OpenAIServingCompletion._build_completion_response"),
    ):
        target = f"{_OPENAI}.{module}.{method}"
        if f"{_OPENAI}.{module}" in sys.modules and target not in HookRegistry._hooks:
            HookRegistry.register(target, _add_to_answer)
    HookRegistry.apply_hooks()


def _add_to_answer(response: Any, _serving: Any, _request: Any, outputs: Any, *_: Any, **__: Any) -> None:
    """Later versions of SGLang, too, have in `metadata` what they know of the first choice."""
    if getattr(response, "metadata", None) is not None:  # an error has none
        response.metadata[_KEY] = outputs[0]["meta_info"].get(_KEY)
