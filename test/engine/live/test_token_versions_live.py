"""The version that an answer gives for each token is that of the weights that have computed it.

transformers computes the log-probability of each token with the weights that the answer names, and from the cache of
the weights before where a pause in place has kept it. If a span ended one token earlier or later, they would differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flights import Flight
from reshard_job import Job
from support.live_engines import PROMPTS
from support.sglangs import chosen
from support.trainers import run_trainers

pytestmark = [pytest.mark.engine]
PROMPT, IN_FLIGHT = PROMPTS[0], 120  # new tokens of a request
SAME, OTHER = 1e-3, 1e-2  # between log-probabilities of the same float32 weights, and of others
PAUSES = {"in place": ["in_place"], "retract": ["retract"], "both": ["in_place", "retract"]}
Span = tuple[str, int, int]


def while_weights_change(job: dict[str, Any]) -> dict[str, Any]:
    """Requests that are paused, once and twice, while other weights come, one that a staged update waits for, and ones
    that begin after these.
    """
    run = Job(job)
    states: dict[str, dict[str, torch.Tensor]] = {}
    for version in ("1", "2", "3"):
        run.step_and_save(version)
        states[version] = {n: p.detach().clone() for n, p in run.trainer.model.named_parameters()}
    engine = run.engine.engine
    seen: dict[str, Any] = {}

    def update(version: str, name: str, **options: Any) -> None:
        run.engine.update_weights_from_tensor(states[version].items(), weight_version=f"{version} {name}", **options)

    def request() -> Flight:
        return Flight(engine, PROMPT, IN_FLIGHT, return_logprob=True)

    for name, modes in PAUSES.items():
        update("1", name)
        flight, had = request(), []
        for version, mode in zip(("2", "3"), modes, strict=False):
            had.append(flight.pause(mode))
            update(version, name, flush_cache="by_version" if mode == "in_place" else True)
            flight.resume()
        seen[name] = {"had": had, **outcome(flight)}
        seen[f"after {name}"] = outcome(request())
    flight = request()
    flight.wait()
    update("1", "staged", staged=True)
    seen["staged"] = outcome(flight)
    seen["after staged"] = outcome(request())
    update("1", "SGLang's")
    flight = request()
    had = [flight.pause("in_place")]
    load(engine, run.checkpoint("2"), "2 SGLang's")
    flight.resume()
    seen["SGLang's"] = {"had": had, **outcome(flight)}
    run.engine.shutdown()
    return seen


def load(engine: Any, checkpoint: Path, version: str) -> None:
    """SGLang's own update."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(
        model_path=str(checkpoint), load_format="auto", weight_version=version, flush_cache=False
    )
    assert engine.loop.run_until_complete(engine.tokenizer_manager.update_weights_from_disk(request))[0]


def outcome(flight: Flight) -> dict[str, Any]:
    tokens = flight.end()["tokens"]
    said = flight.meta_info
    return {
        "tokens": tokens,
        "spans": [[span["version"], span["start"], span["end"]] for span in said["weight_versions"]],
        "version": said["weight_version"],
        "log-probabilities": [row[0] for row in said["output_token_logprobs"]],
    }


def expected(folder: Path, tokens: list[int], spans: Sequence[Span], kept: Sequence[bool]) -> torch.Tensor:
    """What transformers says of a request's tokens.

    kept  for each span, whether its version continues from the cache that the versions before have computed
    """
    ids, kv, read = PROMPT + tokens, None, 0
    found: list[torch.Tensor] = []
    for (version, start, end), keeps in zip(spans, kept, strict=True):
        if not keeps:
            kv, read = None, 0
        if start == end:
            continue
        last = len(PROMPT) + end - 1  # the last token's logits are of the token before
        with torch.no_grad():
            output = model_of(folder / f"checkpoint-{version[0]}")(
                torch.tensor([ids[read:last]]), past_key_values=kv, use_cache=True
            )
        scores = output.logits[0].log_softmax(-1)[len(PROMPT) + start - 1 - read :]
        found.append(scores.gather(1, torch.tensor(tokens[start:end])[:, None])[:, 0])
        kv, read = output.past_key_values, last
    return torch.cat(found)


@cache
def model_of(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def moved(spans: Sequence[Span], boundary: int, by: int) -> list[Span]:
    """These spans, if `boundary` was counted wrong by some tokens."""
    ends = [end + by * (n == boundary) for n, (_, _, end) in enumerate(spans)]
    return [(version, start, end) for (version, *_), start, end in zip(spans, [0, *ends], ends, strict=False)]


@pytest.mark.parametrize(("end", "overlaps"), [("pinned", False), ("pinned", True), ("newest", False)])
def test_each_token_is_of_the_version_that_it_says(end: str, overlaps: bool, tmp_path: Path) -> None:
    job = {"source_tp": 1, "target_tp": 1, "dtype": "float32", "disable_overlap_schedule": not overlaps}
    with chosen(end):
        (seen,) = run_trainers(1, while_weights_change, tmp_path, **job)
    for name, modes in {**PAUSES, "SGLang's": ["in_place"]}.items():
        versions = [f"{n} {name}" for n in ("1", "2", "3")[: len(modes) + 1]]
        request = seen[name]
        assert [version for version, *_ in request["spans"]] == versions
        # A pause in place leaves the last token in flight; retracting processes it.
        computed = [had + (overlaps and mode == "in_place") for had, mode in zip(request["had"], modes, strict=True)]
        assert [stop for *_, stop in request["spans"][:-1]] == computed
        assert_computed(tmp_path, request, [False, *(mode == "in_place" for mode in modes)])
        if (later := seen.get(f"after {name}")) is not None:
            assert later["spans"] == [[versions[-1], 0, IN_FLIGHT]]
            assert_computed(tmp_path, later, [False])
    assert seen["staged"]["spans"] == [["3 both", 0, IN_FLIGHT]], "the update has waited for it"
    assert seen["after staged"]["spans"] == [["1 staged", 0, IN_FLIGHT]]
    for name in ("staged", "after staged"):
        assert_computed(tmp_path, seen[name], [False])


def assert_computed(folder: Path, request: dict[str, Any], kept: list[bool]) -> None:
    tokens, spans = request["tokens"], request["spans"]
    assert request["version"] == spans[-1][0]
    assert len(tokens) == len(request["log-probabilities"]) == spans[-1][2] == IN_FLIGHT
    said = torch.tensor(request["log-probabilities"])

    def difference(of: Sequence[Span]) -> float:
        return float((expected(folder, tokens, of, kept) - said).abs().max())

    computed = difference(spans)
    assert computed < SAME
    for boundary in range(len(spans) - 1):
        for by in (-1, 1):
            assert difference(moved(spans, boundary, by)) > 5 * computed, "the comparison sees one token"
    if len(spans) == 1:
        other = "1" if spans[0][0][0] == "2" else "2"
        assert difference([(other, 0, IN_FLIGHT)]) > OTHER
