"""A live engine that was updated twice since a start on dummy weights says what one says that starts on the checkpoint.

In the checkpoint's own dtype, tokens, log-probabilities and every live tensor, on both ends of the range of SGLang's
versions. What the models compute with is not parameters alone: a forward pass makes copies of them, a loader fills
buffers. The engine that starts on the checkpoint is stock SGLang, without the plugin.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import write_checkpoint
from support.sglangs import chosen
from support.trainers import run_trainers

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
HEAD_DIM, KV_HEADS = 16, 2


@dataclass(frozen=True)
class Model:
    """A model that computes with more than its parameters.

    kept     the end of the names of what is no parameter
    buffers  whether the loader fills them, so that they have to be sent
    instead  other values for keys of the tiny config
    added    keys that transformers does not write
    """

    architecture: str
    kept: str
    buffers: bool = False
    instead: dict[str, Any] = field(default_factory=dict)
    added: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.architecture


ROUTERS = Model("Glm4MoeForCausalLM", "_weight_fp32")
SCALARS = Model(
    "Gemma4ForCausalLM",
    "layer_scalar",
    buffers=True,
    # On a CPU SGLang pads experts, and asks for their size also where there are none.
    instead={"global_head_dim": HEAD_DIM, "moe_intermediate_size": 64},
    # SGLang derives these from the config of the whole model, of which this is the language model.
    added={"swa_head_dim": HEAD_DIM, "swa_v_head_dim": HEAD_DIM, "swa_num_key_value_heads": KV_HEADS,
           "v_head_dim": HEAD_DIM},
)  # fmt: skip


@pytest.mark.parametrize(
    ("sglang", "staged"),
    [
        ("pinned", False),
        pytest.param("pinned", True, marks=pytest.mark.sweep),
        pytest.param("newest", True, marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize("model", [ROUTERS, SCALARS], ids=str)
def test_it_says_what_a_fresh_engine_says(model: Model, sglang: str, staged: bool, tmp_path: Path) -> None:
    for version in ("1", "2"):
        write_checkpoint(model.architecture, tmp_path / version, seed=int(version), instead=model.instead)
        config = tmp_path / version / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | model.added))
    with chosen(sglang):
        buffers = model.kept if model.buffers else ""
        seen = run_trainers(2, "fresh_job:two_updates", tmp_path, staged=staged, buffers=buffers)[0]
        stock = tmp_path / "stock"
        stock.mkdir()
        (fresh,) = run_trainers(
            1,
            "fresh_job:by_stock",
            stock,
            environment={"SGLANG_PLUGINS": "somebody-elses"},
            checkpoint=str(tmp_path / "2"),
        )
    assert seen["2"] == fresh
    assert len({str(seen[of]["tokens"]) for of in ("dummy", "1", "2")}) == 3
    assert any(name.endswith(model.kept) for name in fresh["digests"][0])
    if model.buffers:
        _, why = seen["without buffers"]
        assert f"{model.kept} is a buffer that the loader fills" in why
        assert "state_dict()" in why
