"""Mistakes against a live engine: each refused by name before a byte is written, the old weights served on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

from reshard_job import Job
from sglang_reshard import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq, WeightSender
from support.live_engines import WITHOUT_PLUGIN
from support.refusals import refusal_of
from support.trainers import run_trainers

Refusal = list[str]  # see `refusal_of`
ABSENT: Refusal = ["", "it was not there"]
SUCCESS: Refusal = ["", "it succeeded"]
NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"


def with_changes(run: Job, changes: dict[str, torch.Tensor], *, on: int | None = None) -> list[Any]:
    """The trainer's parameters, with others in their place or added; on all trainer ranks, or on one."""
    parameters = dict(run.trainer.model.named_parameters())
    return list((parameters | (changes if on in (None, run.rank) else {})).items())


def changed(make: Callable[[], torch.Tensor], name: str = NORM, *, on: int | None = None) -> Callable[[Job], Refusal]:
    return lambda run: run.refusal(None, named=with_changes(run, {name: make()}, on=on))


def missing(run: Job) -> Refusal:
    return run.refusal(None, named=[(n, p) for n, p in run.trainer.model.named_parameters() if n != DOWN])


def other_order(run: Job) -> Refusal:
    parameters = list(run.trainer.model.named_parameters())
    return run.refusal(None, named=parameters[::-1] if run.rank == 1 else parameters)


def partial(run: Job) -> Refusal:
    down = dict(run.trainer.model.named_parameters())[DOWN]
    summand = DTensor.from_local(down.to_local().detach(), down.device_mesh, [Partial()], run_check=False)
    return run.refusal(None, named=with_changes(run, {DOWN: summand}))


def offloaded(run: Job) -> Refusal:
    engine = run.engine.engine
    if engine is not None:
        engine.release_memory_occupation(["weights"])
    refusal = run.refusal(None)
    if engine is not None:
        engine.resume_memory_occupation(["weights"])
    return refusal


# -- with a sender of their own, beside the engine's


Send = Callable[[DistributedUpdateWeightsReq], DistributedUpdateWeightsOutput]


def by_another_sender(run: Job, send: Send, *, present: bool = True, **options: Any) -> Refusal:
    sender = WeightSender.over(dist.group.WORLD, send if run.rank == 0 else None, **options)
    told = refusal_of(lambda: sender.update(run.trainer.model.named_parameters())) if present else ABSENT
    sender.close()
    return told


def engine_of(run: Job) -> Any:
    assert run.engine.engine is not None
    return run.engine.engine


def never_shows_up(run: Job) -> Refusal:
    def send(request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
        raise AssertionError("the engine was asked although a trainer rank was missing")

    return by_another_sender(run, send, present=run.rank == 0, timeout_s=3)


def another_protocol(run: Job) -> Refusal:
    def send(request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
        older = msgspec.structs.replace(request, package_version="0.0.9", protocol=0)
        return engine_of(run).update_weights_distributed(older)

    return by_another_sender(run, send)


def while_another_runs(run: Job) -> Refusal:
    """Two requests at a time, as two trainers would send them to one server: the second is refused, the first not.

    Both name the same update, so that its trainer would be right to take a refusal of either for a success.
    """
    told: list[DistributedUpdateWeightsOutput] = []

    def send(request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
        engine = engine_of(run)

        async def both() -> list[DistributedUpdateWeightsOutput]:
            other = msgspec.structs.replace(request, address=request.address.named("another"))
            manager = engine.tokenizer_manager
            return await asyncio.gather(*(manager.update_weights_distributed(r) for r in (request, other)))

        told.extend(engine.loop.run_until_complete(both()))
        return told[0]

    assert by_another_sender(run, send) == SUCCESS
    return ["EngineRefused", told[1].message] if told and not told[1].success else ABSENT


def half_of_the_mesh(run: Job) -> Refusal:
    """Only trainer rank 0 takes part, and its DTensors live on both."""
    alone = dist.new_group([0])
    refusal = ABSENT
    if run.rank == 0:
        sender = WeightSender.over(alone, engine_of(run).update_weights_distributed)
        refusal = refusal_of(lambda: sender.update(run.trainer.model.named_parameters()))
        sender.close()
    dist.barrier()
    return refusal


# What is done -> how, the error's class, and what it has to say: which tensor, which rank, what to do.
MISTAKES: dict[str, tuple[Any, ...]] = {
    "unknown name": (
        changed(lambda: torch.zeros(3), "model.layers.1.mlp.no_such_proj.weight"),
        *("EngineRefused", "engine rank 0", "model.layers.1.mlp.no_such_proj.weight", "ignore="),
    ),
    "missing": (missing, "EngineRefused", "engine rank 0", DOWN, "not written by the loader", "Compare the names"),
    "wrong shape": (
        changed(lambda: torch.zeros(5)),
        *("EngineRefused", "engine rank 0", NORM, "Compare names, shapes and dtypes"),
    ),
    "integers": (
        changed(lambda: torch.ones(512, dtype=torch.int32)),
        *("EngineRefused", "engine rank 0", NORM, "torch.int32", "Send the tensor in the engine's format"),
    ),
    "complex numbers": (
        changed(lambda: torch.ones(512, dtype=torch.complex64)),
        *("Unsupported", "trainer rank 0", NORM, "complex64", "cast it first"),
    ),
    "a name on one rank only": (
        changed(lambda: torch.zeros(3), "model.extra", on=1),
        *("Mismatch", "trainer rank 1", "tensors", "the same tensors in the same order"),
    ),
    "another order on one rank": (other_order, "Mismatch", "trainer rank 1", "model.embed_tokens.weight", "same order"),
    "another shape on one rank": (
        changed(lambda: torch.zeros(5), on=1),
        *("Mismatch", "trainer rank 1", NORM, "shape", "(5,)"),
    ),
    "another dtype on one rank": (
        changed(lambda: torch.zeros(512, dtype=torch.bfloat16), on=1),
        *("Mismatch", "trainer rank 1", NORM, "dtype", "bfloat16"),
    ),
    "partial": (partial, "Unsupported", DOWN, "Partial(sum)", "redistribute"),
    "meta": (
        changed(lambda: torch.zeros(512, device="meta")),
        *("Unsupported", "trainer rank 0", NORM, "meta", "materialize it"),
    ),
    "sparse": (
        changed(lambda: torch.ones(512).to_sparse()),
        *("Unsupported", "trainer rank 0", NORM, "sparse", "pass a dense one"),
    ),
    "same version": (
        lambda run: run.refusal("1"),
        *("EngineRefused", "already version '1'", "a different weight_version"),
    ),
    "offloaded": (offloaded, "EngineRefused", "engine rank 0", "offloaded", "resume_memory_occupation"),
    "a rank never shows up": (
        never_shows_up,
        *("DeadlineExceeded", "trainer ranks [1]", "within 3 s", "look at the logs of these ranks"),
    ),
    "another protocol": (another_protocol, "EngineRefused", "0.0.9", "install the same version"),
    "while another runs": (while_another_runs, "EngineRefused", "is running", "repeat this one when it has ended"),
    "half of the mesh": (half_of_the_mesh, "Unsupported", "hold", "elements"),
}


def make_all(job: dict[str, Any]) -> dict[str, Any]:
    """Each mistake, and what the engine says after it; then an update without one."""
    run = Job(job)
    run.step_and_save("1")
    run.update("1")
    seen: dict[str, Any] = {"tokens": {"before": run.tokens()}, "refusals": {}}
    digests = run.live_digests("before")
    for name, (mistake, *_) in MISTAKES.items():
        seen["refusals"][name] = mistake(run)
        seen["tokens"][name] = run.tokens()
    seen["untouched"] = run.live_digests("after") == digests
    run.step_and_save("2")
    seen["report"] = run.update("2")
    seen["tokens"]["after"] = run.tokens()
    seen["expected"] = run.expected_tokens("2")
    run.engine.shutdown()
    return seen


def start_only(job: dict[str, Any]) -> Refusal:
    """How the start of an engine that cannot be updated fails."""
    return refusal_of(lambda: Job(job))


pytestmark = [pytest.mark.engine]

ON_ONE_RANK = {"a rank never shows up", "while another runs", "half of the mesh"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two trainer ranks and a TP=2 engine, in float32."""
    sizes = {"source_tp": 2, "target_tp": 2, "dtype": "float32", "bucket_bytes": 1 << 20}
    return run_trainers(2, make_all, tmp_path_factory.mktemp("mistakes"), **sizes)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_by_name(ranks: list[dict[str, Any]], mistake: str) -> None:
    _, kind, *words = MISTAKES[mistake]
    refusal = ranks[0]["refusals"][mistake]
    assert refusal[0] == kind, refusal
    assert all(word in refusal[1] for word in words), refusal[1]
    if mistake not in ON_ONE_RANK:
        assert ranks[1]["refusals"][mistake] == refusal
    assert ranks[0]["tokens"][mistake] == ranks[0]["tokens"]["before"], "the engine serves on"


def test_no_byte_was_written(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["untouched"]


def test_the_next_update_works(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["report"]["success"]
    assert ranks[0]["tokens"]["after"] == ranks[0]["expected"]
    assert ranks[0]["expected"] != ranks[0]["tokens"]["before"]


def test_an_engine_without_the_plugin_is_noticed_at_its_start(tmp_path: Path) -> None:
    sizes = {"source_tp": 2, "target_tp": 1, "dtype": "float32"}
    ranks = run_trainers(2, start_only, tmp_path, environment=WITHOUT_PLUGIN, **sizes)
    assert ranks[0] == ranks[1]
    kind, message = ranks[0]
    assert kind == "Unsupported"
    assert "SGLANG_PLUGINS" in message
