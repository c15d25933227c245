"""Run by test_slime_updater.py: Megatron-Core models on CPU, and the example of an updater in a stand-in of slime.

`main` puts together what the ranks would send, without an engine. `updates` is a loop of updates of a real server.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmark.reference import greedy_tokens
from sglang_reshard import RemoteEngine
from sglang_reshard.patches.launch import without_torchrun_variables
from sglang_reshard.selftest.digests import LOADER, read_live_digests
from sglang_reshard.sources.memory_identity import MemoryIdentity
from sglang_reshard.testing import cpu_host
from support import slime_stand_in
from support.case_job import answer_cases
from support.live_engines import NEW_TOKENS, PROMPTS, greedy
from support.megatron_models import Case, checkpoint, export, initial_models, load, megatron_models, parallel, reference
from support.partial_states import not_assembled, of_this_rank
from support.refusals import refusal_of
from support.servers import launch, serving
from support.transformer_engine_names import rename
from support.world import Trainer
from tools.oracle.http_engine import HttpEngine

RANKS = 4
HOOKS = {trainer: f"slime_weight_updater.use_in_{trainer}" for trainer in ("slime", "miles")}
# SGLang's server as slime starts it, in a process of its Ray actor: without either of SGLang's commands.
PROGRAM = (
    "import sys; from sglang.srt.server_args import prepare_server_args; "
    "from sglang.srt.entrypoints.http_server import launch_server; launch_server(prepare_server_args(sys.argv[1:]))"
)


class Recorder:
    """Takes the place of the sender, and keeps what it is given."""

    given: list[Any]

    def update(self, given: list[Any], **options: Any) -> dict[str, Any]:
        assert options["partial"]
        self.given = given
        return {}


def with_names_of_transformer_engine(models: list[Any]) -> None:
    """Gives parameters the names that slime's converters know, and no marks to grouped experts, as it does there."""
    for model in models:
        rename(model)
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.tensor_model_parallel, parameter.partition_dim = False, -1


def examine(_: Trainer, of: tuple[str, Case]) -> list[str]:
    """What is wrong of the tensors that this rank, or all ranks together, would send."""
    trainer, case = of
    expected = checkpoint(reference(case))
    slime_stand_in.install(trainer)
    with parallel(case):
        models = megatron_models(case, expected)
        with_names_of_transformer_engine(models)
        actor = slime_stand_in.Actor(trainer, slime_stand_in.arguments(case), models, HOOKS[trainer])
        actor.weight_updater.sender = sender = Recorder()
        actor.weight_updater.update_weights()
        first = sender.given
        wrong = not_assembled(of_this_rank(first), expected)
        live = {parameter.untyped_storage().data_ptr() for model in models for parameter in model.parameters()}
        wrong += [f"{name} was copied" for name, t, _ in first if t.untyped_storage().data_ptr() not in live]
        actor.weight_updater.update_weights()
        if not MemoryIdentity(first).unchanged(sender.given):
            wrong.append("the same weights are news")
        for model in models:
            for parameter in model.parameters():
                parameter.data = parameter.data * 2  # in other memory, as after an offload
        actor.weight_updater.update_weights()
        twice = {name: tensor * 2 for name, tensor in expected.items()}
        wrong += [f"elsewhere: {why}" for why in not_assembled(of_this_rank(sender.given), twice)]
    return wrong


@contextmanager
def server(folder: Path, tp_size: int) -> Iterator[str]:
    """A server on trainer rank 0; its URL on all ranks."""
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        options = ["--skip-tokenizer-init", "--custom-weight-loader", LOADER]
        command = launch(folder / "1", tp_size, *options, program=("-c", PROGRAM))
        with without_torchrun_variables(), serving(command, cpu_host.environment(tp_size), folder / "server") as url:
            dist.broadcast_object_list([url], src=0)
            yield url
    else:
        dist.broadcast_object_list(shared, src=0)
        yield shared[0]


class Loop:
    """The stand-in of a trainer's loop: an optimizer step, which writes the next version, and a weight update."""

    def __init__(self, trainer: str, case: Case, models: list[Any], hook: str) -> None:
        slime_stand_in.install(trainer)
        self.actor = slime_stand_in.Actor(trainer, slime_stand_in.arguments(case), models, hook)
        self.parameters = [parameter for model in models for parameter in model.parameters()]

    def step(self, weights: list[torch.Tensor], engines: list[Any], new: int) -> dict[str, float]:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, weights, strict=True):
                parameter.copy_(value)
        self.actor.update_weights(engines, new)
        return self.actor.log()


def updates(job: dict[str, Any]) -> dict[str, Any]:
    """Two steps of slime, one that is refused, and two of miles, which finds the server as slime has left it."""
    folder, case, tp_size = Path(job["folder"]), Case(**job["case"]), job["tp_size"]
    exported = {version: export(folder, case, version) for version in ("1", "2")}
    dist.barrier()
    seen: dict[str, Any] = {"digests": [], "tokens": [], "versions": [], "metrics": []}
    with server(folder, tp_size) as url, parallel(case):
        models, states = initial_models(case), {}
        named = [parameter for model in models for parameter in model.parameters()]
        for version, tensors in exported.items():
            load(case, models, tensors)
            states[version] = {id(parameter): parameter.detach().clone() for parameter in named}
        with_names_of_transformer_engine(models)
        engine = RemoteEngine(url)

        def look() -> None:
            if dist.get_rank() == 0:
                address = url.removeprefix("http://")
                seen["digests"].append(read_live_digests(HttpEngine(address, tp_size), folder / "digests"))
                seen["tokens"].append(greedy(engine))
                seen["versions"].append(engine.weights_info().version)
            dist.barrier()

        for trainer, hook in HOOKS.items():
            engines = [slime_stand_in.Engine(trainer, url, f"the first of {trainer}")]
            loop = Loop(trainer, case, models, hook)
            weights = {version: [state[id(p)] for p in loop.parameters] for version, state in states.items()}
            for version in states:
                seen["metrics"].append(loop.step(weights[version], engines, new=int(version == "1")))
                look()
            if trainer == "slime":
                updater = loop.actor.weight_updater
                without = [listed for listed in updater.parameters.tensors() if listed[0] != "model.norm.weight"]
                updater.parameters = SimpleNamespace(tensors=without.copy)
                seen["refused"] = refusal_of(functools.partial(loop.step, weights["1"], engines, new=0))
                look()
            loop.actor.sleep()
    if dist.get_rank() == 0:
        seen["expected"] = [greedy_tokens(folder / v, PROMPTS, NEW_TOKENS, "float32")[0] for v in states]
    return seen


def main(cases: list[tuple[str, dict[str, Any]]]) -> None:
    answer_cases(RANKS, examine, [(trainer, Case(**case)) for trainer, case in cases], deadline_s=900)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
