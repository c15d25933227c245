"""Wherever a forward pass keeps something of a weight: an update is right, or refused by name; never silently stale.

The outcomes are the table of docs/results/derived-state.md.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch

from sglang_reshard.derived import DerivedState, remember_loaded
from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.tracer import trace
from support import deriving
from support.derived_patterns import PLACES, VALUES, layer
from support.reachable_state import reachable_state
from tools import marked
from tools.oracle.replay import replay
from toy_loader import specs_of

X = torch.arange(2.0 * deriving.SIZE).reshape(2, deriving.SIZE)
PAGE = Path(__file__).parents[2] / "docs" / "results" / "derived-state.md"


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"weight": torch.randn(deriving.SIZE, deriving.SIZE, generator=generator).bfloat16()}


def loaded(kind, seed):
    made = kind()
    made.load_weights(weights(seed).items())
    return made


def says(place, value, seed):
    with layer(place, value) as kind:
        return loaded(kind, seed)(X)


def outcome(expected, place, value, addresses_stay):
    """Updates a layer that has run, three times; the layer runs twice after each."""
    with layer(place, value) as kind:
        made = loaded(kind, 0)
        remember_loaded(made)
        derived = DerivedState(made, addresses_stay)
        assert torch.equal(made(X), expected[0])
        for seed in (1, 2, 1):
            try:
                derived.signature()
                replay(trace(made, specs_of(weights(seed))), weights(seed), derived)
            except Unsupported:
                assert torch.equal(made(X), expected[0])  # the old weights keep serving
                return "refused"
            if not all(torch.equal(made(X), expected[seed]) for _ in range(2)):
                return "silently wrong"
        return "right"


@pytest.fixture(scope="module")
def outcomes():
    found = {(place, stay): Counter() for place in PLACES for stay in (False, True)}
    with torch.no_grad():
        for place, value in product(PLACES, VALUES):
            expected = [says(place, value, seed) for seed in range(3)]
            assert not torch.equal(expected[0], expected[1])
            for stay in (False, True):
                found[place, stay][outcome(expected, place, value, stay)] += 1
    return found


def test_no_update_is_silently_wrong(outcomes):
    assert [case for case, found in outcomes.items() if found["silently wrong"]] == []


def test_few_are_refused_without_cuda_graphs(outcomes):
    refused = {place for (place, stay), found in outcomes.items() if found["refused"] and not stay}
    assert refused == {"new forward", "weight alone"}


@pytest.mark.parametrize("value", ["copy", "number"])
@pytest.mark.parametrize("place", [place for place in PLACES if not place.startswith("weight")])
def test_the_oracle_sees_what_was_kept(place, value):
    """The weights are written and nothing is renewed: something differs from a fresh layer in addition to weights."""

    def state(seed, then=None):
        with layer(place, value) as kind:
            made = loaded(kind, seed)
            made(X)
            if then is not None:
                made.weight.copy_(weights(then)["weight"])
            return {name.rpartition("derived_pattern")[2]: d for name, d in reachable_state(made).items()}

    with torch.no_grad():
        stale, fresh = state(0, then=1), state(1)
    in_layer = {name.partition(".layer.")[2] or name: digest for name, digest in stale.items()}
    differing = [n for n, d in fresh.items() if in_layer.get(n.partition(".layer.")[2] or n) != d]
    assert [name for name in differing if not name.endswith("weight/0")]


def test_the_page_has_these_outcomes(outcomes):
    def said(found):
        return ", ".join(f"{n} {what}" for what, n in sorted(found.items(), reverse=True))

    whole = [sum((found for (_, s), found in outcomes.items() if s == stay), Counter()) for stay in (False, True)]
    rows = [(place, outcomes[place, False], outcomes[place, True]) for place in PLACES]
    lines = [f"| {place} | {said(without)} | {said(with_)} |" for place, without, with_ in (*rows, ("all", *whole))]
    assert marked.read(PAGE, PAGE.stem).splitlines()[2:] == lines
