"""verl with engines on the trainer's own devices: after every update, every engine rank holds its weights."""

from __future__ import annotations

import pytest

from seen import RESHARD, assert_arrived, assert_nothing_gathered, assert_says_the_same, cold_loads
from support.verl_host import run_job, verl_folder

pytestmark = [pytest.mark.verl, pytest.mark.timeout(420), pytest.mark.usefixtures("forks")]
STOCK: list[str] = []


@pytest.mark.parametrize(
    "backend", [pytest.param(RESHARD, id="reshard"), pytest.param(STOCK, id="stock", marks=pytest.mark.sweep)]
)
def test_two_updates_are_bit_exact(backend: list[str]) -> None:
    order = {"colocated": True, "ranks": 2, "replicas": 1, "tp_size": 2, "dtype": "float32", "overrides": backend}
    with verl_folder() as folder:
        seen = run_job("jobs:two_updates", folder, **order)
        assert_arrived(seen["updates"], cold_loads(folder, 2, 2, "float32"))
    assert_says_the_same(seen["updates"])
    assert seen["interrupted"] == ["abort"]
    if backend is RESHARD:
        assert_nothing_gathered(seen["updates"], tp_size=2)
    else:  # the counter counts
        assert all(update["gathers"] == [update["tensors"]] * 2 for update in seen["updates"])
