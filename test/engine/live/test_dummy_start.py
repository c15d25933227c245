"""A live engine in the checkpoint's dtype, on dummy weights as verl starts it, of a model with persistent buffers.

The reference is an engine that stock SGLang starts on the checkpoint: tokens, log-probabilities, every live tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import write_checkpoint
from support.sglangs import ENDS, chosen
from support.trainers import run_trainers

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]
HEAD_DIM, KV_HEADS = 16, 2
# On a CPU SGLang pads experts, and asks for their size also where there are none.
SIZES = {"global_head_dim": HEAD_DIM, "moe_intermediate_size": 64}
# SGLang derives these from the config of the whole model, of which this is the language model.
OF_SLIDING_LAYERS = {"swa_head_dim": HEAD_DIM, "swa_v_head_dim": HEAD_DIM, "swa_num_key_value_heads": KV_HEADS}


@pytest.fixture(scope="module", params=ENDS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("dummy start")
    for seed in (1, 2):
        write_checkpoint("Gemma4ForCausalLM", folder / str(seed), seed=seed, instead=SIZES)
        config = folder / str(seed) / "config.json"
        written = json.loads(config.read_text())
        assert (written["head_dim"], written["num_key_value_heads"]) == (HEAD_DIM, KV_HEADS)
        config.write_text(json.dumps(written | OF_SLIDING_LAYERS | {"v_head_dim": HEAD_DIM}))
    with chosen(request.param):
        ranks: list[dict[str, Any]] = run_trainers(1, "dummy_start_job:updates", folder, deadline_s=400)
    return ranks[0]


def test_updated_twice_it_is_an_engine_started_on_the_checkpoint(seen: dict[str, Any]) -> None:
    before, first, second = seen["tokens"]
    assert second == seen["fresh tokens"]
    assert first not in (before, second)
    assert seen["digests"][1] == seen["fresh digests"]
    assert seen["digests"][0] != seen["digests"][1]
    assert any("layer_scalar" in name for name in seen["fresh digests"][0])


def test_without_the_buffers_it_is_refused_and_keeps_its_weights(seen: dict[str, Any]) -> None:
    assert "layer_scalar is a buffer that the loader fills" in seen["without buffers"][1]
    assert "state_dict()" in seen["without buffers"][1]
