"""Which weights have computed which output tokens: spans of requests while versions change, and batches in flight."""

from __future__ import annotations

import sys
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_reshard.patches import token_versions
from sglang_reshard.patches.token_versions import Event, spans


class Request:
    """As SGLang's: it appends output tokens, and sends slices of its values."""

    def __init__(self, *output_ids: int) -> None:
        self.output_ids, self.ended = list(output_ids), False
        self.customized_info: dict[str, Any] = {}
        self.weight_version_events: list[Event] = []
        token_versions.watch(None, self)

    def finished(self) -> bool:
        return self.ended

    def sent(self, offset: int = 0) -> list[Any]:
        found = self.customized_info["weight_versions"][offset : len(self.output_ids)]
        return [(span["version"], span["start"], span["end"]) for span in found]

    def end(self) -> list[Any]:
        self.ended = True
        return self.sent()


class Scheduler:
    """With overlap scheduling: `step` computes a token per request, and processes the tokens of the step before."""

    def __init__(self, *requests: Request) -> None:
        self.requests = list(requests)
        self.result_queue: deque[Any] = deque()
        self.server_args = SimpleNamespace(weight_version="1")
        self.handlers: dict[type, Any] = {}
        self._request_dispatcher = SimpleNamespace(_mapping=self.handlers)
        token_versions.begin(None, self)

    def process_batch_result(self, batch: Any, tokens: int) -> None:
        for request in batch.reqs:
            request.output_ids += [0] * tokens

    def step(self, tokens: int = 1) -> None:
        batch = SimpleNamespace(reqs=list(self.requests))
        self.result_queue.append((batch, tokens))
        if len(self.result_queue) > 1:
            self.process_batch_result(*self.result_queue.popleft())


def test_a_request_of_one_version_has_one_span() -> None:
    Scheduler()
    it = Request()
    assert it.end() == [("1", 0, 0)]
    it.output_ids += [5, 6, 7]
    assert it.sent() == [("1", 0, 3)]


def test_tokens_are_of_the_version_that_was_live_when_they_came() -> None:
    scheduler, waiting = Scheduler(), Request()
    it = Request(5, 6)
    token_versions.record(scheduler, "2")
    it.output_ids += [7]
    token_versions.record(scheduler, None)
    token_versions.record(scheduler, "2")
    token_versions.record(scheduler, "3")
    token_versions.record(scheduler, "4")  # nothing was computed with version 3
    for request in (it, waiting):
        request.output_ids += [8, 9]
    assert it.end() == [("1", 0, 2), ("2", 2, 3), ("4", 3, 5)]
    assert waiting.end() == [("4", 0, 2)]
    assert Request(1).end() == [("4", 0, 1)]


def test_only_the_end_of_a_request_has_spans() -> None:
    """Some versions of SGLang append what it sends to what it has sent, others replace that."""
    scheduler, it = Scheduler(), Request(5, 6)
    token_versions.record(scheduler, "2")
    assert it.sent() == []
    it.output_ids += [7]
    it.ended = True
    assert it.sent(offset=2) == [("1", 0, 2), ("2", 2, 3)]


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    assert spans([Event("1", 5)], "2", 3) == [{"version": "1", "start": 0, "end": 3}]
    assert spans([Event("1", 2), Event("2", 5)], "3", 3) == [
        {"version": "1", "start": 0, "end": 2},
        {"version": "2", "start": 2, "end": 3},
    ]


RETRACT = None


@pytest.mark.parametrize(
    ("before", "happens", "expected"),
    [
        ([], [1, 1, "2", 1, 1], [("1", 0, 2), ("2", 2, 3)]),
        # Speculative decoding accepts several tokens a step, and how many is known once its result is processed.
        ([], [3, 3, "2", 1, 1], [("1", 0, 6), ("2", 6, 7)]),
        # The first token, and a part of a prompt, which computes none.
        ([], [1, "2", 1, 1], [("1", 0, 1), ("2", 1, 2)]),
        ([], [1, "2", 1], [("1", 0, 1)]),
        ([], [0, "2", 1, 1], [("2", 0, 1)]),
        # SGLang drops the token of a request that it has retracted since, which is computed again.
        ([4, 5], [1, "2", RETRACT, 1, 1], [("1", 0, 2), ("2", 2, 3)]),
        ([4], [1, "2", "3", 1, 1], [("1", 0, 2), ("3", 2, 3)]),
    ],
)
def test_a_batch_in_flight_is_of_the_old_version(before: list[int], happens: list[Any], expected: list[Any]) -> None:
    """Steps of so many tokens, and updates to a version."""
    requests = [Request(*before), Request(*before)]
    scheduler = Scheduler(*requests)
    for what in happens:
        if what is RETRACT:
            scheduler.result_queue[0] = (scheduler.result_queue[0][0], 0)
        elif isinstance(what, str):
            token_versions.record(scheduler, what)
        else:
            scheduler.step(what)
    assert [request.end() for request in requests] == [expected] * 2
    assert "process_batch_result" not in vars(scheduler), "the loop runs without this package again"


def test_a_request_that_ends_in_flight_is_sent_before_its_result_is_processed() -> None:
    it = Request(4, 5)
    scheduler = Scheduler(it)
    seen = []

    class Sends(deque[Any]):  # what SGLang does inside of process_batch_result
        def popleft(self) -> Any:
            batch, tokens = super().popleft()
            it.output_ids += [0] * tokens
            seen.append(it.end())
            return batch, 0

    scheduler.result_queue = Sends()
    scheduler.step()
    token_versions.record(scheduler, "2")
    scheduler.requests = []
    scheduler.step()
    assert seen == [[("1", 0, 3)]]


class Stock:
    weight_version: str | None


class Other:
    pass


def test_sglang_s_own_updates_are_recorded_if_they_succeed() -> None:
    scheduler, it = Scheduler(), Request(5)
    outcome = SimpleNamespace(success=False)
    scheduler.handlers |= {Stock: lambda request: outcome, Other: lambda request: "other"}
    token_versions.begin(None, scheduler)
    handle = scheduler.handlers[Stock]
    assert handle(SimpleNamespace(weight_version="2")) is outcome
    assert it.sent() == []
    assert Request(1).end() == [("1", 0, 1)]
    outcome.success = True
    handle(SimpleNamespace(weight_version="2"))
    it.output_ids += [6]
    assert it.end() == [("1", 0, 1), ("2", 1, 2)]
    assert scheduler.handlers[Other](None) == "other"


def test_later_versions_record_themselves() -> None:
    told: list[str | None] = []
    it = SimpleNamespace(record_weight_version_change=lambda new_version: told.append(new_version))
    token_versions.record(it, "7")
    token_versions.record(it, None)
    assert told == ["7", None]


def test_a_batch_in_flight_is_of_the_old_version_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    serving, it = SimpleNamespace(weight_version="1"), Request()
    scheduler = Scheduler(it)
    monkeypatch.setitem(
        sys.modules,
        "sglang.srt.runtime_context",
        SimpleNamespace(get_serving=lambda: serving),  # type: ignore[arg-type]
    )

    def stock(_scheduler: Scheduler, new_version: str) -> None:
        if it.output_ids and new_version != serving.weight_version:
            it.weight_version_events.append(Event(serving.weight_version, len(it.output_ids)))
        serving.weight_version = new_version

    scheduler.step()
    scheduler.step()
    token_versions.around_record(stock, scheduler, new_version="1")
    assert it.weight_version_events == []
    token_versions.around_record(stock, scheduler, new_version="2")
    scheduler.step()
    scheduler.step()
    assert spans(it.weight_version_events, "2", 3) == [
        {"version": "1", "start": 0, "end": 2},
        {"version": "2", "start": 2, "end": 3},
    ]


def test_an_answer_of_the_openai_api_has_them_in_its_metadata() -> None:
    found = [{"version": "1", "start": 0, "end": 2}]
    answer, error = SimpleNamespace(metadata={"weight_version": "1"}), SimpleNamespace()
    for response in (answer, error):
        token_versions._add_to_answer(response, None, None, [{"meta_info": {"weight_versions": found}}], 0)
    assert answer.metadata == {"weight_version": "1", "weight_versions": found}
    assert vars(error) == {}
