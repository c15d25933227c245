"""Wherever a forward pass keeps something of a weight: an update is right, or refused by name; never silently stale.

The outcomes are the table of docs/results/derived-state.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oracle.replay import replay
from sglang_reshard.derived import DerivedState, remember_loaded
from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.tracer import trace
from support import derived_patterns, deriving
from support.reachable_state import reachable_state
from toy_loader import specs_of

X = torch.arange(2.0 * deriving.SIZE).reshape(2, deriving.SIZE)
PATTERNS = (*deriving.LAZY, *derived_patterns.PATTERNS)
REFUSED = {derived_patterns.InNewForward, derived_patterns.FoldedFromOutside}
# A method of the layer computes them again where they are.
IN_PLACE = {
    "InAttribute", "InMissingAttribute", "InBuffer", "ByMethod", "InHiddenModule", "OnParameter", "InSlots",
    "InNamespace", "InThread",
}  # fmt: skip
PAGE = Path(__file__).parents[2] / "docs" / "results" / "derived-state.md"
NAMES = {False: "without CUDA graphs", True: "with CUDA graphs"}


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"weight": torch.randn(deriving.SIZE, deriving.SIZE, generator=generator).bfloat16()}


def forget() -> None:
    derived_patterns.forget()
    deriving.forget()


def loaded(kind, seed):
    forget()
    layer = kind()
    layer.load_weights(weights(seed).items())
    return layer


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield
    forget()


def outcome(kind, addresses_stay):
    """Updates a layer that has run, three times; the layer runs twice after each."""
    expected = [loaded(kind, seed)(X) for seed in range(3)]
    assert not torch.equal(expected[0], expected[1])
    layer = loaded(kind, 0)
    remember_loaded(layer)
    derived = DerivedState(layer, addresses_stay)
    assert torch.equal(layer(X), expected[0])
    for seed in (1, 2, 1):
        try:
            derived.signature()
            replay(trace(layer, specs_of(weights(seed))), weights(seed), derived)
        except Unsupported as refused:
            assert torch.equal(layer(X), expected[0])  # the old weights keep serving
            return "refused" if str(refused) else "refused without a reason"
        if not all(torch.equal(layer(X), expected[seed]) for _ in range(2)):
            return "silent"
    return "right"


def expected_outcome(kind, addresses_stay):
    right = kind.__name__ in IN_PLACE if addresses_stay else kind not in REFUSED
    return "right" if right else "refused"


@pytest.mark.parametrize("addresses_stay", [False, True], ids=NAMES.values())
@pytest.mark.parametrize("kind", PATTERNS)
def test_an_update_is_right_or_refused(kind, addresses_stay):
    assert outcome(kind, addresses_stay) == expected_outcome(kind, addresses_stay)


@pytest.mark.parametrize("kind", PATTERNS)
def test_the_oracle_sees_what_was_kept(kind):
    """The weights are written and nothing is renewed: something differs from a fresh layer in addition to weights."""
    fresh = loaded(kind, 1)
    fresh(X)
    wanted = reachable_state(fresh)
    stale = loaded(kind, 0)
    stale(X)
    stale.weight.copy_(fresh.weight)
    found = reachable_state(stale)
    differing = {name for name, digest in wanted.items() if found.get(name) != digest}
    of_weights = {n for n in differing if n.rpartition("/")[0].endswith((" weight", ".weight"))}
    folded = kind.__name__.startswith("Folded")  # those keep nothing but the weight
    assert folded or differing - of_weights


def test_the_page_has_these_outcomes():
    rows = [(kind, *(expected_outcome(kind, stay) for stay in NAMES)) for kind in PATTERNS]
    table = "\n".join(f"| {kind.__name__} | {without} | {with_} |" for kind, without, with_ in rows)
    assert table in PAGE.read_text(), table
    for column, name in enumerate(NAMES.values(), 1):
        said = [row[column] for row in rows]
        assert f"{name} {said.count('right')} are right, {said.count('refused')} refused" in PAGE.read_text()
