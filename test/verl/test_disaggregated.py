"""verl with engines on devices of their own: after every update, every engine rank holds the trainer's weights."""

from __future__ import annotations

from typing import Any

import pytest

from seen import FSDP1, GLOO_RANK0, OURS, RESHARD, assert_nothing_gathered, cold_loads, run
from support.live_memory import differing
from support.trainer_rows import shown
from support.verl_host import run_job, verl_folder

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("forks")]


def test_requests_are_interrupted_and_replicas_come_and_go() -> None:
    """From three ranks with uneven shards."""
    overrides = [*RESHARD, f"{OURS}.transport=p2p", f"{OURS}.verify=full"]
    seen = run("replicas_come_and_go", 3, ranks=3, replicas=1, tp_size=1, overrides=overrides)
    assert [len(update["tokens"]) for update in seen["updates"]] == [1, 2, 1]
    assert seen["interrupted"] == ["abort"] * 2
    assert seen["healed"] == seen["updates"][0]["expected_tokens"], "before any sync reached it"
    assert seen["removed"] == seen["updates"][1]["expected_tokens"]
    assert_nothing_gathered(seen["updates"], tp_size=1)


@pytest.mark.sweep
def test_a_replica_that_fails_is_left_out_healed_by_the_other_and_back() -> None:
    overrides = [*RESHARD, f"{OURS}.on_failure=exclude", f"{OURS}.verify=full"]
    order = {"colocated": False, "dtype": "float32", "overrides": overrides}
    with verl_folder() as folder:
        seen = run_job("jobs:one_replica_fails", folder, ranks=2, replicas=2, tp_size=1, **order)["updates"]
    for update in seen:
        assert update["tokens"] == [update["expected"]] * len(update["tokens"])
    assert [update["left_out"] for update in seen] == [1, 1, 0]
    assert [update["versions"] for update in seen] == [["2", "1"], ["3", "3"], ["4", "4"]]


def test_syncs_in_the_background_send_what_has_changed() -> None:
    """`asynchronous` and `delta`. The first sync waits, as the replica has no weights before it."""
    settings = [f"{OURS}.{setting}" for setting in ("transport=p2p", "asynchronous=True", "delta=auto", "staged=True")]
    order = {"colocated": False, "dtype": "bfloat16", "ranks": 2, "replicas": 1, "tp_size": 1}
    with verl_folder() as folder:
        seen = run_job("jobs:in_the_background", folder, **order, overrides=[*RESHARD, *settings])["updates"]
        cold = cold_loads(folder, 4, order["tp_size"], order["dtype"])
    for update, (loaded,) in zip(seen, cold, strict=True):
        assert differing(update["digests"][0], loaded) == []
    assert [update["served"] for update in seen] == ["1", "2", "3", "4"]
    metrics = [update["metrics"] for update in seen]
    assert [m["reshard/staleness"] for m in metrics] == [0, 1, 1, 1]
    first, *previous = metrics
    assert "reshard/delta" not in first
    assert ["reshard/previous/delta" in m for m in previous] == [False, True, True]
    assert previous[-1]["reshard/previous/bytes_per_rank"] < first["reshard/bytes_per_rank"] / 8
    assert 0 < previous[-1]["reshard/previous/changed_share"] < 0.1


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("ranks", "replicas", "tp_size", "transport", "strategy"),
    [(3, 1, 2, "auto", RESHARD), (2, 2, 1, "p2p", RESHARD), (3, 1, 2, "p2p", FSDP1)],
    ids=["3 uneven ranks to TP=2", "2 ranks to 2 of TP=1", "3 ranks of FSDP1 to TP=2"],
)
def test_two_updates_gather_nothing_and_interrupt_requests(
    ranks: int, replicas: int, tp_size: int, transport: str, strategy: list[str], record_property: Any
) -> None:
    overrides = [*strategy, f"{OURS}.transport={transport}", f"{OURS}.verify=full"]
    seen = run("two_updates", 2, ranks=ranks, replicas=replicas, tp_size=tp_size, overrides=overrides)
    assert_nothing_gathered(seen["updates"], tp_size)
    assert seen["interrupted"] == ["abort"] * replicas
    name = "FSDP1, verl's default" if strategy is FSDP1 else "FSDP2"
    record_property("trainer", shown(f"verl, {name}", "verl's configuration, disaggregated", transport, "run"))


@pytest.mark.sweep
def test_the_yardstick_is_right_and_gathers_everything() -> None:
    """`benchmark.verl.rank0_broadcast`; here so that what is measured against it means something."""
    seen = run("two_updates", 2, ranks=2, replicas=1, tp_size=1, overrides=GLOO_RANK0)
    for update in seen["updates"]:
        assert update["gathers"] == [update["tensors"]] * 2
