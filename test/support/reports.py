"""Reports as trainer ranks have them."""

from __future__ import annotations

from typing import Any


def of_others(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the report of trainer rank 0 as the others have it: without bytes by trainer rank."""
    engine_ranks = [{**rank, "read_bytes": {}} for rank in report["engine_ranks"]]
    return {**report, "trainer_ranks": [], "engine_ranks": engine_ranks}
