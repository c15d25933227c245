"""Megatron-Core models resharded in place: what all ranks' parameters hold, put together, is the checkpoint.

Real models on CPU over gloo, with verl's own probes and its export index to compare with; the converters that
Megatron-Bridge would give it are `support.megatron_bridge`'s. That the models are what they should be is shown by
their logits, which are those of the transformers model.
"""

from pathlib import Path

import pytest

from support.scripts import answers

JOB = Path(__file__).parent / "megatron_job.py"
# As `support.megatron_models.Case`, which imports Megatron-Core, and whether the bridge lists tied embeddings of both
# pipeline stages. The other ranks of four are data parallel.
CASES = {
    "tp2": {"kind": "qwen3", "tp": 2},
    "tp2 bias tied": {"kind": "qwen2", "tp": 2, "tied": True},
    "tp2 inside a group": {"kind": "qwen2", "tp": 2, "groups": 1},
    "tp4": {"kind": "qwen3", "tp": 4, "groups": 4},
    "tp2 pp2": {"kind": "qwen3", "tp": 2, "pp": 2},
    "tp2 pp2 tied": {"kind": "qwen3", "tp": 2, "pp": 2, "tied": True},
    "tp2 pp2 tied, both listed": {"kind": "qwen3", "tp": 2, "pp": 2, "tied": True, "both_tied": True},
    "tp2 pp2 vp2": {"kind": "qwen3", "tp": 2, "pp": 2, "vp": 2, "layers": 4},
    "pp4 vp2 tied, both listed": {"kind": "qwen2", "pp": 4, "vp": 2, "layers": 8, "tied": True, "both_tied": True},
    "ep2": {"kind": "qwen3_moe", "ep": 2},
    "tp2 ep2": {"kind": "qwen3_moe", "tp": 2, "ep": 2},
    "tp2 ep2 etp2": {"kind": "qwen3_moe", "tp": 2, "ep": 2, "etp": 2},
    "tp2 ep4": {"kind": "qwen3_moe", "tp": 2, "ep": 4},
}
OF_LAYER = {"llama": 9, "qwen3": 11, "qwen2": 12, "qwen3_moe": 9 + 3 * 4, "qwen3_vl_moe": 9 + 2}


def check(case, of_ranks):
    """Asserts that all is right, and that logits were compared, on all ranks of the last pipeline stage."""
    for rank, found in enumerate(of_ranks):
        assert found["wrong"] == [], f"trainer rank {rank}"
        assert found["tensors"] == OF_LAYER[case["kind"]] * case.get("layers", 2) + (2 if case.get("tied") else 3)
    assert sum(found["logits"] for found in of_ranks) == 4 // case.get("pp", 1)


@pytest.fixture(scope="module")
def results():
    return answers(JOB, CASES)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_parameters_put_together_are_the_checkpoint(results, name):
    check(CASES[name], results[name])


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        # Norms are in one piece, whoever holds them; all else is in one piece on each tensor parallel rank, ...
        ("tp2", 9 + 16 * 2),
        ("tp4", 9 + 16 * 4),
        # ... but keys and values, weights and biases, where the one group's are with its last queries on one rank.
        ("tp2 inside a group", 5 + 2 * (4 + 6 * 2) + 2 * 2),
        # Experts are whole on their ranks, or halved.
        ("tp2 ep4", 45 + 2 * 4 + 2),
        ("tp2 ep2 etp2", 45 + 2 * 4 + 2 + 2 * 3 * 4),
    ],
)
def test_a_tensor_is_in_few_pieces(results, name, pieces):
    assert {found["pieces"] for found in results[name]} == {pieces}
