"""Live engines say of a few tokens what the trainer's own forward says, until they compute with a stale copy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from reshard_job import Job
from sglang_reshard import Probe, VerlEngine
from sglang_reshard.extras.probe.probing import compare
from sglang_reshard.selftest.digests import LOADER, write_json
from support.live_engines import live_digests, live_engine
from support.refusals import refusal_of
from support.sglangs import ENDS, chosen
from support.trainers import run_trainers

STALE = "test_probe_engines.keep_stale_copies"
SEQUENCES = [[*range(20, 52)], [7, 7, 7], [4098, 0, 1500, 3]]  # the vocabulary's last token among them


class ProbedJob(Job):
    """A job whose engine may have data parallel ranks, and can be made to compute with stale copies."""

    def start(self, mesh: DeviceMesh) -> VerlEngine:
        sizes = {"tp_size": self.job["target_tp"], "dp_size": self.job.get("dp_size", 1)}
        options = {"bucket_bytes": 1 << 20, "load_format": "dummy", "dtype": self.job["dtype"]}
        return live_engine(mesh, self.model_path, loaders=[LOADER, STALE], **sizes, **options)

    def probed(self, version: str, **options: Any) -> dict[str, Any]:
        """A probe's report as JSON has it. The trainer's own module computes its numbers, sharded as it is."""
        named = ("timeout_s", "mean_threshold", "largest_threshold", "on_mismatch")
        of_probe = {name: options.pop(name) for name in named if name in options}
        probe = Probe(SEQUENCES, self.trainer.model, **of_probe)
        return self.update(version, probe=probe, **options)["probe"]

    def fill_the_prefix_cache(self) -> None:
        self.engine.generate(input_ids=SEQUENCES, sampling_params={"temperature": 0, "max_new_tokens": 2})

    def cached_tokens(self) -> int:
        """How many tokens of the first sequence the prefix cache serves now to somebody else."""
        sampling = {"temperature": 0, "max_new_tokens": 1}
        (output,) = self.engine.generate(input_ids=SEQUENCES[:1], sampling_params=sampling)
        return output["meta_info"]["cached_tokens"]


def updates_with_probes(job: dict[str, Any]) -> dict[str, Any]:
    """Right ones, with a full prefix cache and while paused; then with a copy that no update writes."""
    run = ProbedJob(job)
    seen: dict[str, Any] = {}
    run.step_and_save("1")
    seen["first"] = run.probed("1")
    run.fill_the_prefix_cache()
    run.step_and_save("2")
    seen["with what the old weights cached"] = run.probed("2", flush_cache=False)
    seen["cached"] = run.cached_tokens()
    run.step_and_save("3")
    seen["verified"] = run.probed("3", verify="full", staged=True)
    run.engine.pause_generation("abort")
    seen["paused"] = run.probed("4")
    run.engine.continue_generation()
    seen["kept"] = live_digests(run.engine, run.folder / "kept", STALE)
    dist.barrier()
    seen["fresh copies"] = run.probed("5")
    for _ in range(3):
        run.step_and_save("6")
    seen["stale copies"] = refusal_of(lambda: run.probed("6", verify="full"))
    seen["warned"] = run.probed("7", on_mismatch="warn", verify="full")
    seen["tokens"], seen["expected tokens"] = run.tokens(), run.expected_tokens("6")
    run.engine.shutdown()
    return seen


def few_updates(job: dict[str, Any]) -> dict[str, Any]:
    """Two right ones."""
    run = ProbedJob(job)
    seen = {}
    for version in ("1", "2"):
        run.step_and_save(version)
        seen[version] = run.probed(version)
    run.engine.shutdown()
    return seen


# -- in the engine's processes


def keep_stale_copies(model: torch.nn.Module, named_tensors: Any) -> None:
    """A custom weight loader that loads nothing: the model computes with copies that its next forward makes.

    The copies are bytes, which no search for tensors finds.
    """
    kept = 0
    for name, module in model.named_modules():
        if name.endswith("mlp.down_proj"):
            copies: dict[str, bytes] = {}
            module.register_forward_pre_hook(partial(_put_the_copy, copies))
            module.register_forward_hook(partial(_put_back, copies))
            kept += 1
    write_json(kept, named_tensors)


def _put_the_copy(copies: dict[str, bytes], module: torch.nn.Module, _: Any) -> None:
    copies["live"] = _bytes_of(module.weight)
    _write(module.weight, copies.setdefault("made by the first forward", copies["live"]))


def _put_back(copies: dict[str, bytes], module: torch.nn.Module, *_: Any) -> None:
    _write(module.weight, copies["live"])


def _bytes_of(weight: Any) -> bytes:
    return weight.detach().contiguous().view(torch.uint8).numpy().tobytes()


def _write(weight: Any, data: bytes) -> None:
    weight.data.copy_(torch.frombuffer(bytearray(data), dtype=weight.dtype).view(weight.shape))


pytestmark = [pytest.mark.engine]
TOKENS = 31 + 2 + 3  # of probe_job.SEQUENCES, without the first of each


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """FSDP2 over TP=2 on four trainer ranks, in float32, into a TP=2 engine in bfloat16."""
    job = {"source_tp": 2, "target_tp": 2, "dtype": "bfloat16"}
    return run_trainers(4, updates_with_probes, tmp_path_factory.mktemp("probe"), **job)


@pytest.fixture(scope="module")
def seen(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return ranks[0]


@pytest.mark.parametrize("name", ["first", "with what the old weights cached", "verified", "fresh copies"])
def test_the_engine_says_what_the_trainer_says(seen: dict[str, Any], name: str) -> None:
    probe = seen[name]
    assert probe["skipped"] == ""
    assert probe["tokens"] == TOKENS
    assert 0 < probe["mean_difference"] < 0.03, "bfloat16 of float32 weights"
    assert probe["largest_difference"] < 0.3
    assert probe["seconds"] >= probe["engine_seconds"] > 0


def test_the_numbers_are_of_these_weights_and_no_others(seen: dict[str, Any]) -> None:
    first, second = seen["first"], seen["with what the old weights cached"]
    found, _ = compare(first["sequences"], first["trainer"], [second["trainer"]])
    assert found.mean > 0.1, "one step is seen"
    assert seen["cached"] > 0, "others are served from the cache"


def test_a_paused_engine_is_not_waited_for(seen: dict[str, Any]) -> None:
    assert "generation is paused" in seen["paused"]["skipped"]
    assert seen["paused"]["seconds"] < 30


def test_a_stale_copy_that_no_rule_knows_is_caught_after_a_verified_update(seen: dict[str, Any]) -> None:
    assert seen["kept"] == [4, 4], "layers, on both engine ranks"
    kind, message = seen["stale copies"]
    assert kind == "ProbeMismatch"
    assert "after the update to version '6'" in message
    assert "mean_threshold=0.05" in message
    assert seen["warned"]["mean_difference"] > 0.05
    assert seen["tokens"] != seen["expected tokens"], "it was worth catching"


def test_every_trainer_rank_is_told_the_same(ranks: list[dict[str, Any]], seen: dict[str, Any]) -> None:
    for rank in ranks[1:]:
        assert {**rank, "kept": seen["kept"]} == seen  # the first one has the engine


@pytest.mark.sweep
@pytest.mark.parametrize("end", ENDS)
def test_data_parallel_ranks_are_probed_each(end: str, tmp_path: Path) -> None:
    with chosen(end):
        (seen, _) = run_trainers(2, few_updates, tmp_path, source_tp=1, target_tp=1, dp_size=2, dtype="float32")
    for version in ("1", "2"):
        probe = seen[version]
        assert probe["skipped"] == ""
        assert len(probe["engine"]) == 2
        assert probe["tokens"] == 2 * TOKENS
        assert probe["largest_difference"] < 1e-3
