"""What drivers of verl do in test_colocated.py and test_disaggregated.py."""

from __future__ import annotations

from typing import Any

import ray

from demo import text
from job import PROMPTS, a_job


def two_updates(order: dict[str, Any]) -> dict[str, Any]:
    """Two updates, the second one into engines that are at work. order: whether `colocated`, and what a job takes"""
    with a_job(order) as job:
        first = job.change_and_update(1)
        asked = job.ask_for_long()
        second = job.change_and_update(2)
        interrupted = [output.stop_reason for output in ray.get(asked)]
        return {"updates": [first, second], "interrupted": interrupted}


def replicas_come_and_go(order: dict[str, Any]) -> dict[str, Any]:
    """An update of one replica; of two, after another one came; and of the second, after the first one went."""
    with a_job(order, spare=order["tp_size"]) as job:
        one = job.change_and_update(1)
        added = job.new_replica(1)
        job.replicas.append(added)
        job.manager.add_replicas([added.replica])
        two = job.change_and_update(2)
        removed = job.replicas.pop(0)
        job.manager.remove_replicas([removed.replica])
        other = job.change_and_update(3)
        return {"updates": [one, two, other], "removed": removed.tokens(PROMPTS, text.NEW_TOKENS)}
