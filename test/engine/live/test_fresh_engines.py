"""A live engine that was updated twice since a start on dummy weights says what one says that starts on the checkpoint.

In the checkpoint's own dtype, tokens, log-probabilities and every live tensor, on both ends of the range of SGLang's
versions. The models keep state that a forward pass computes from weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoints import write_checkpoint
from support.sglangs import chosen
from support.trainers import run_trainers

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("sglang", "staged"),
    [
        ("pinned", False),
        pytest.param("pinned", True, marks=pytest.mark.sweep),
        pytest.param("newest", True, marks=pytest.mark.sweep),
    ],
)
def test_it_says_what_a_fresh_engine_says(sglang: str, staged: bool, tmp_path: Path) -> None:
    for version in ("1", "2"):
        write_checkpoint("Glm4MoeForCausalLM", tmp_path / version, seed=int(version))
    engine = {"tp_size": 2, "dtype": "bfloat16"}
    with chosen(sglang):
        job = "fresh_job:beside_a_fresh_engine"
        seen = run_trainers(2, job, tmp_path, deadline_s=350, engine=engine, staged=staged)[0]
    assert seen["2"]["tokens"] == seen["fresh"]["tokens"]
    assert seen["2"]["logprobs"] == seen["fresh"]["logprobs"]
    assert seen["2"]["digests"] == seen["fresh"]["digests"]
    assert len({str(seen[of]["tokens"]) for of in ("dummy", "1", "2")}) == 3
