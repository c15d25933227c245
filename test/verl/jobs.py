"""What drivers of verl do in test_colocated.py and test_disaggregated.py."""

from __future__ import annotations

import functools
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import ray

from job import PROMPTS, a_job, expected_tokens
from sglang_reshard import RemoteEngine
from sglang_reshard.selftest import text

TINY = Path(__file__).parents[2] / "examples" / "tiny_on_cpu.py"


def two_updates(order: dict[str, Any]) -> dict[str, Any]:
    """Two updates, the second one into engines that are at work. order: whether `colocated`, and what a job takes"""
    with a_job(order) as job:
        first = job.change_and_update(1)
        asked = job.ask_for_long()
        second = job.change_and_update(2)
        interrupted = [output.stop_reason for output in ray.get(asked)]
        return {"updates": [first, second], "interrupted": interrupted}


def served_adapters(order: dict[str, Any]) -> dict[str, Any]:
    """Two updates, with LoRA adapters that are not merged: the second changes only these."""
    with a_job(order) as job:
        return {"updates": [job.change_and_update(1), job.change_and_update(2, only="lora_")]}


def replicas_come_and_go(order: dict[str, Any]) -> dict[str, Any]:
    """An update of one replica; of two that are at work, after another one came; and of the second, after the first
    one went. Trainer ranks but the first have checkpoint engines that were not told whether they are the master."""
    with a_job(order, spare=order["tp_size"]) as job:
        job.trainer.leave_out_is_master()
        one = job.change_and_update(1)
        # Digests were taken by what SGLang counts as an update; this one is the last before the replica comes.
        job.manager.update_weights(global_steps=11)
        added = job.new_replica(1)
        job.replicas.append(added)
        job.manager.add_replicas([added.replica])
        healed = added.tokens(PROMPTS, text.NEW_TOKENS)
        asked = job.ask_for_long()
        two = job.change_and_update(2)
        interrupted = [output.stop_reason for output in ray.get(asked)]
        removed = job.replicas.pop(0)
        job.manager.remove_replicas([removed.replica])
        other = job.change_and_update(3)
        said = removed.tokens(PROMPTS, text.NEW_TOKENS)
        return {"updates": [one, two, other], "interrupted": interrupted, "removed": said, "healed": healed}


def one_replica_fails(order: dict[str, Any]) -> dict[str, Any]:
    """Two replicas, of which the second refuses a sync, cannot be healed after it, but can after the next one."""
    with a_job(order) as job:
        addresses = [f"http://{r.replica.server_address}" for r in job.replicas]
        bad = RemoteEngine(addresses[1])
        job.update(1)
        bad.release_memory_occupation(["weights"])
        seen = []
        for version in (2, 3, 4):
            job.trainer.perturb(version)
            update = job.update(version)
            checkpoint = job.trainer.save(job.folder / f"checkpoint-{version}")
            expected = expected_tokens(checkpoint)
            if version == 2:
                time.sleep(5)  # in which it is asked to pull, and refuses
                bad.resume_memory_occupation(["weights"])
            deadline = time.monotonic() + 60
            while version == 3 and bad.weights_info().version != "3" and time.monotonic() < deadline:
                time.sleep(0.5)
            time.sleep(1)  # the trainer has heard of it, too
            asked = job.replicas if version > 2 else job.replicas[:1]
            tokens = [r.tokens(PROMPTS, text.NEW_TOKENS) for r in asked]
            versions = [RemoteEngine(url).weights_info().version for url in addresses]
            left_out = update["metrics"]["reshard/left_out"]
            seen.append({"left_out": left_out, "tokens": tokens, "expected": expected, "versions": versions})
        return {"updates": seen}


def in_the_background(order: dict[str, Any]) -> dict[str, Any]:
    """Four syncs that do not wait for their updates; the last three change few tensors each.

    served  the version of the replica's weights, once the sync's update has ended
    """
    with a_job(order) as job:
        (replica,) = job.replicas
        server = RemoteEngine(f"http://{replica.replica.server_address}")
        seen = []
        for version in (1, 2, 3, 4):
            job.trainer.perturb(version, "layernorm" if version > 1 else "")
            update = job.update(version)
            job.trainer.save(job.folder / f"checkpoint-{version}")
            deadline = time.monotonic() + 60
            while server.weights_info().version != str(version) and time.monotonic() < deadline:
                time.sleep(0.1)
            served, digests = server.weights_info().version, replica.live_digests(job.folder / "digests")
            seen.append({**update, "served": served, "digests": digests})
        return {"updates": seen}


def ppo(order: dict[str, Any]) -> None:
    """examples/tiny_on_cpu.py. order: `overrides`, of its settings, and `main`, another of verl's programs

    The program that it becomes at its end is run in this process, so that a fork remains one.
    """
    os.execve = functools.partial(_become, order["main"])  # type: ignore[assignment]
    sys.argv = [str(TINY), order["folder"], *order["overrides"]]
    runpy.run_path(str(TINY), run_name="__main__")


def _become(main: str | None, _: str, command: list[str], environment: dict[str, str]) -> None:
    _, module, name, *sys.argv[1:] = command
    assert module == "-m"
    os.environ.update(environment)
    runpy.run_module(main or name, run_name="__main__", alter_sys=True)
