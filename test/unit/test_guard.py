"""The guard of `make bench-quick`: what got worse by more than noise is named, and nothing else."""

from __future__ import annotations

from typing import Any

from benchmark.guard import other_host, worse


def row(path: str, ratio: float, spread: float = 0.1) -> dict[str, Any]:
    return {"case": "dense", "path": path, "times_limit": ratio, "seconds_median": 1.0, "seconds_p95": 1 + spread}


def test_only_what_is_beyond_the_noise_of_both_runs_is_named() -> None:
    old = [row("ipc", 1.0), row("p2p", 2.0), row("gone", 1.0), row("auto", 1.0, 0.5), row("stock", 80.0)]
    new = [row("ipc", 1.3), row("p2p", 2.3), row("new", 9.0), row("auto", 1.5), row("stock", 109.0)]
    assert worse(old, new) == ["dense, ipc: 1.30 times the copy, 1.00 before; noise 20%"]
    assert worse(old, old) == worse(new, []) == []


def test_another_kind_of_host_is_named() -> None:
    here, there = ({"host": {"cpu": cpu, "cores": 2}} for cpu in ("AMD EPYC", "Intel Xeon"))
    assert other_host(here, here) == ""
    assert other_host(there, here) == "the earlier results are of 2 cores of Intel Xeon, these of 2 of AMD EPYC"
