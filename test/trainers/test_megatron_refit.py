"""From one parallel layout of a Megatron-Core model to another: the shapes of Megatron-Core's refit tests, and more.

Real models over gloo. The target's elements are compared bit for bit with those that Megatron-Core's metadata for
distributed checkpoints puts there, after two runs of one plan; the bytes with what each rank lacks.
"""

from pathlib import Path
from typing import Any

import pytest

from support.scripts import answers

JOB = Path(__file__).parent / "megatron_refit_job.py"
Layout = dict[str, int]

# tensor, pipeline, expert parallel sizes of source and target, as Megatron-Core's tests have them; the other ranks are
# data parallel.
DENSE = {"kind": "qwen3", "tied": True}
EXPERTS = {"kind": "qwen3_moe", "tied": True}
PUBLISHED: list[tuple[dict[str, Any], Layout, Layout]] = [
    (DENSE, {"tp": 2}, {}),
    (DENSE, {}, {"tp": 2}),
    (DENSE, {"tp": 2}, {"tp": 4}),
    (DENSE, {"pp": 2}, {}),
    (DENSE, {}, {"pp": 2}),
    (DENSE, {"tp": 2, "pp": 2}, {}),
    (DENSE, {}, {"tp": 2, "pp": 2}),
    (DENSE, {"tp": 2}, {"pp": 2}),
    (DENSE, {"pp": 2}, {"tp": 2}),
    (DENSE, {"pp": 2}, {"tp": 2, "pp": 4}),
    (EXPERTS, {"ep": 2}, {"ep": 4}),
    (EXPERTS, {"ep": 2}, {}),
    (EXPERTS, {}, {"ep": 2}),
    (EXPERTS, {"ep": 2}, {"pp": 2, "ep": 2}),
]

# Untied, with biases. Without a group of heads for each tensor parallel rank, one is divided.
BIASED = {"kind": "qwen2"}
DIVIDED = {"kind": "qwen2", "groups": 2}
OF_DENSE = [
    (BIASED, {}, {}),
    (BIASED, {"tp": 4}, {"tp": 2}),
    (DIVIDED, {"tp": 4}, {}),
    (DIVIDED, {}, {"tp": 4}),
    (BIASED, {"pp": 4}, {}),
    (BIASED, {}, {"pp": 4}),
    (BIASED, {"pp": 4}, {"pp": 2}),
    (BIASED, {"pp": 2}, {"pp": 4}),
    (BIASED, {"pp": 4}, {"tp": 4}),
    (BIASED, {"tp": 4}, {"pp": 4}),
    (BIASED, {"tp": 2, "pp": 2}, {"tp": 4}),
    (BIASED, {"tp": 4}, {"tp": 2, "pp": 2}),
    (BIASED, {"tp": 2, "pp": 4}, {"tp": 4, "pp": 2}),
    (BIASED, {"tp": 4, "pp": 2}, {"tp": 2, "pp": 4}),
    (BIASED, {"pp": 2, "vp": 2}, {"pp": 4}),
    (BIASED, {"pp": 4}, {"pp": 2, "vp": 2}),
    (BIASED, {"tp": 2, "pp": 2, "vp": 2}, {"tp": 4}),
    (BIASED, {"tp": 4}, {"tp": 2, "pp": 2, "vp": 2}),
]

UNTIED = {"kind": "qwen3_moe"}
OF_EXPERTS = [
    (UNTIED, {"tp": 2, "etp": 2}, {"ep": 2}),
    (UNTIED, {"ep": 2}, {"tp": 2, "etp": 2}),
    (UNTIED, {"tp": 2, "ep": 2, "etp": 2}, {"ep": 4}),
    (UNTIED, {"ep": 4}, {"tp": 2, "ep": 2, "etp": 2}),
    (UNTIED, {"tp": 2, "ep": 2}, {"tp": 2, "etp": 2}),
    (UNTIED, {"tp": 2, "etp": 2}, {"tp": 2, "ep": 2}),
    (UNTIED, {"tp": 4, "ep": 4}, {}),
    (UNTIED, {}, {"tp": 4, "ep": 4}),
    (UNTIED, {"tp": 4, "etp": 4}, {"ep": 4}),
    (UNTIED, {"ep": 4}, {"tp": 4, "etp": 4}),
    (UNTIED, {"pp": 2, "ep": 4}, {"pp": 4, "ep": 2}),
    (UNTIED, {"pp": 4, "ep": 2}, {"pp": 2, "ep": 4}),
    (UNTIED, {"tp": 2, "pp": 2, "ep": 2, "etp": 2}, {"tp": 4, "ep": 2}),
    (UNTIED, {"tp": 4, "ep": 2}, {"tp": 2, "pp": 2, "ep": 2, "etp": 2}),
    (UNTIED, {"pp": 2, "vp": 2, "ep": 2}, {"ep": 4}),
    (UNTIED, {"ep": 4}, {"pp": 2, "vp": 2, "ep": 2}),
]
FEW = [(DENSE, {"tp": 2, "pp": 2}, {"tp": 4}), (UNTIED, {"tp": 2, "ep": 2, "etp": 2}, {"ep": 4})]


def name_of(model: dict[str, Any], source: Layout, target: Layout) -> str:
    sizes = ("".join(f"{k}{v}" for k, v in side.items()) or "whole" for side in (source, target))
    return f"{model['kind']} with {model.get('groups', 4)} groups{', tied' * ('tied' in model)}: {' to '.join(sizes)}"


@pytest.mark.parametrize(
    ("ranks", "layers", "configurations"),
    [
        pytest.param(4, 2, FEW, id="two moves"),
        pytest.param(8, 4, [*PUBLISHED, *OF_DENSE, *OF_EXPERTS], marks=pytest.mark.sweep, id="the matrix"),
    ],
)
def test_from_any_parallel_layout_to_another(ranks: int, layers: int, configurations: list[Any]) -> None:
    sizes = {"layers": layers, "heads": 8, "groups": 4}
    pairs = {name_of(*c): [sizes | c[0] | side for side in c[1:]] for c in configurations}
    assert len(pairs) == len(configurations)
    assert answers(JOB, pairs, str(ranks)) == dict.fromkeys(pairs, [[]] * ranks)
