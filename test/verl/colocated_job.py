"""What the driver of test_colocated.py does: engines on the trainer's own devices, as in verl's colocate_async."""

from __future__ import annotations

from typing import Any

import ray

from job import a_job


def two_updates(order: dict[str, Any]) -> dict[str, Any]:
    """Two updates, the second one after engines at work were interrupted."""
    with a_job(order, colocated=True) as job:
        first = job.change_and_update(1)
        asked = job.ask_for_long()
        second = job.change_and_update(2)
        interrupted = [output.stop_reason for output in ray.get(asked)]
        return {"updates": [first, second], "interrupted": interrupted}
