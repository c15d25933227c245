"""The order in which a pipeline's stages handle an update's request: what each does in an iteration, without stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.engine
LOOP = 2  # microbatches of a loop


class Stage:
    """A scheduler with as much of SGLang's as `PipelineStage` uses; `said` is what it did, in order."""

    def __init__(self, first: bool) -> None:
        from sglang_reshard.patches.io_struct import UpdateWeightsDistributedReqOutput
        from sglang_reshard.patches.pipeline import PipelineStage
        from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput

        self.said: list[Any] = []
        self.answers: list[DistributedUpdateWeightsOutput] = []
        self.pp_group = SimpleNamespace(is_first_rank=first)
        self.pp_loop_size = LOOP
        self.mbs: list[Any] = [None] * LOOP
        self.running_mbs: list[Any] = [SimpleNamespace(is_empty=lambda: True)] * LOOP
        self.send_to_tokenizer = SimpleNamespace(send_output=lambda output, _: self.answers.append(output.open()))
        updated = UpdateWeightsDistributedReqOutput.of(DistributedUpdateWeightsOutput(success=True, message=""))

        def handle(request: Any) -> Any:
            self.said.append(("update", request.step))
            return updated

        PipelineStage(self, handle)  # type: ignore[arg-type]

    def process_input_requests(self, requests: list[Any]) -> None:
        self.said += [("process", request) for request in requests]

    def get_next_batch_to_run(self) -> None:
        self.said.append("next")

    def iterate(self, *requests: Any) -> list[Any]:
        """An iteration of event_loop_pp; returns what the next stage gets."""
        received = list(requests)
        self.process_input_requests(received)
        self.said.append("send")
        self.get_next_batch_to_run()
        return received


def request() -> Any:
    from sglang_reshard.patches.io_struct import UpdateWeightsDistributedReqInput

    return UpdateWeightsDistributedReqInput(payload=b"", step="update")


def test_the_first_stage_sends_a_request_on_before_it_handles_it() -> None:
    stage, update = Stage(first=True), request()
    assert stage.iterate("generate", update) == ["generate"], "kept back until the pipeline has been empty for a while"
    passed = [stage.iterate() for _ in range(2 * LOOP)]
    assert passed == [*[[]] * (2 * LOOP - 1), [update]]
    assert stage.said[-3:] == ["send", ("update", "update"), "next"]
    assert ("process", update) not in stage.said
    assert [answer.success for answer in stage.answers] == [True]
    assert stage.iterate() == []


def test_a_later_stage_handles_it_in_the_same_iteration() -> None:
    stage, update = Stage(first=False), request()
    assert stage.iterate("generate", update) == ["generate", update]
    assert stage.said == [("process", "generate"), "send", ("update", "update"), "next"]


def test_a_microbatch_in_the_pipeline_holds_it_up() -> None:
    stage, update = Stage(first=True), request()
    stage.iterate(update)
    stage.mbs[1] = SimpleNamespace(is_empty=lambda: False)
    for _ in range(5 * LOOP):
        assert stage.iterate() == []
    stage.mbs[1] = None
    assert [stage.iterate() for _ in range(2 * LOOP + 1)][-1] == [update]


def test_requests_that_do_not_end_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_reshard.patches import pipeline

    monkeypatch.setattr(pipeline, "DRAIN_S", 0.0)
    stage = Stage(first=True)
    stage.running_mbs = [SimpleNamespace(is_empty=lambda: False)] * LOOP
    assert stage.iterate(request()) == []
    (answer,) = stage.answers
    assert not answer.success
    assert "requests still run in the engine's pipeline stages" in answer.message
    assert stage.iterate() == []
    assert len(stage.answers) == 1
