"""What the trainer ranks of test_probe.py do: updates with a probe, of engines right and wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from reshard_job import Job
from sglang_reshard import Probe, VerlEngine
from sglang_reshard.testing import cpu_host
from support.refusals import refusal_of
from tools.oracle.digests import LOADER, read_live_digests, write_json

STALE = "probe_job.keep_stale_copies"
SEQUENCES = [[*range(20, 52)], [7, 7, 7], [4098, 0, 1500, 3]]  # the vocabulary's last token among them


class ProbedJob(Job):
    """A job whose engine may have data parallel ranks, and can be made to compute with stale copies."""

    def start(self, mesh: DeviceMesh) -> VerlEngine:
        tp, dp = self.job["target_tp"], self.job.get("dp_size", 1)
        cpu_host.activate(tp, dp)
        return VerlEngine(
            device_mesh_cpu=mesh,
            tp_size=tp,
            dp_size=dp,
            bucket_bytes=1 << 20,
            timeout_s=180,
            model_path=str(self.model_path),
            load_format="dummy",
            dtype=self.job["dtype"],
            custom_weight_loader=[LOADER, STALE],
            **cpu_host.engine_arguments(),
        )

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
    if run.engine.engine is not None:
        seen["kept"] = read_live_digests(run.engine.engine, run.folder / "kept", STALE)
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
