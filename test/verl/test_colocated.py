"""verl with engines on the trainer's own devices: after every update, every engine rank holds its weights."""

from __future__ import annotations

from typing import Any

import pytest

from seen import FSDP1, MERGED, RESHARD, SERVED, assert_nothing_gathered, assert_says_the_same, run
from support.trainer_rows import shown
from support.verl_host import run_job, verl_folder

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("forks")]
STOCK: list[str] = []
ORDER: dict[str, Any] = {"colocated": True, "ranks": 2, "replicas": 1, "tp_size": 2, "dtype": "float32"}


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(RESHARD, id="fsdp2", marks=pytest.mark.sweep),
        pytest.param(FSDP1, id="fsdp"),
        pytest.param(STOCK, id="stock", marks=pytest.mark.sweep),
    ],
)
def test_two_updates_are_bit_exact(backend: list[str], record_property: Any) -> None:
    seen = run("two_updates", 2, **ORDER, overrides=backend)
    assert seen["interrupted"] == ["abort"]
    if backend is not STOCK:
        assert_nothing_gathered(seen["updates"], tp_size=2)
        strategy = "FSDP1, verl's default" if backend is FSDP1 else "FSDP2"
        record_property("trainer", shown(f"verl, {strategy}", "verl's configuration, colocated", "auto", "run"))
    else:  # the counter counts
        assert all(update["gathers"] == [update["tensors"]] * 2 for update in seen["updates"])


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", [pytest.param(RESHARD, id="fsdp2"), pytest.param(FSDP1, id="fsdp")])
def test_merged_adapters_are_bit_exact(strategy: list[str], record_property: Any) -> None:
    """The adapters and the weights beside them change; what engines have is what verl's own merging gives."""
    run("two_updates", 2, **ORDER, overrides=[*strategy, *MERGED])
    name = "FSDP1" if strategy is FSDP1 else "FSDP2"
    record_property("trainer", shown(f"verl, {name}, LoRA merged", "verl's configuration, colocated", "auto", "run"))


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", [pytest.param(RESHARD, id="fsdp2"), pytest.param(FSDP1, id="fsdp")])
def test_an_adapter_is_served_beside_the_weights(strategy: list[str], record_property: Any) -> None:
    """verl's requests ask for it. The first sync brings the weights, too; of the second, only the adapter moves."""
    with verl_folder() as folder:
        seen = run_job("jobs:served_adapters", folder, **ORDER, overrides=[*strategy, *SERVED])
    assert_says_the_same(seen["updates"])
    first, second = seen["updates"]
    assert set(first["gathers"]) == set(second["gathers"]) == {0}
    # Each of two engine ranks has the whole adapter; of trainer rank 0 they have a half of it.
    assert second["metrics"]["reshard/sent_bytes_rank0"] == 2 * second["rank0_adapter_bytes"]
    assert second["metrics"]["reshard/sent_bytes_rank0"] < second["rank0_matrix_bytes"] / 4
    name = "FSDP1" if strategy is FSDP1 else "FSDP2"
    record_property("trainer", shown(f"verl, {name}, LoRA served", "verl's configuration, colocated", "auto", "run"))
