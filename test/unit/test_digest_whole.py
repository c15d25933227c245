"""One number for a model: the same for any trainer, engine and order of names, and another for other weights."""

import msgspec
import numpy as np
import pytest
import torch

from sglang_reshard.landings.checked import whole_model
from sglang_reshard.landings.checked.regions import Selection
from sglang_reshard.landings.checked.source import SourceChecksums
from sglang_reshard.landings.checked.target import TargetChecksums
from sglang_reshard.layout.regions import Region
from sglang_reshard.plan import TensorIndex
from sglang_reshard.sources import SourceLayout
from sglang_reshard.trace.tracer import trace
from support.plans import shards
from support.toy import ToyRank, checkpoint
from test_digest_ranks import HIDDEN, TRAINERS, layout_of

FULL = Selection.full()


def digest(layout, engines, weights, dtype=torch.bfloat16, selection=FULL):
    """Of weights that such trainer ranks have, for an engine of so many ranks."""
    traced = [trace(ToyRank(e, engines, dtype, HIDDEN), [t.spec for t in layout.tensors]) for e in range(engines)]
    kept = [TargetChecksums(TensorIndex.of(layout), program).regions for program in traced]
    local = [shards(layout, weights, rank) for rank in range(layout.trainer_ranks)]
    parts = [SourceChecksums(layout, own, rank, kept).compute(selection).model for rank, own in enumerate(local)]
    return whole_model.model_digest(whole_model.to_bytes(part) for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_depends_on_no_layout_and_no_size(dtype):
    weights = checkpoint(1, hidden=HIDDEN)
    found = {digest(layout_of(kind), engines, weights, dtype) for kind in TRAINERS for engines in (1, 2, 4, 8)}
    assert len(found) == 1
    assert len(found.pop()) == 16


def test_it_does_not_depend_on_the_order_of_the_tensors():
    layout, weights = layout_of("fsdp"), checkpoint(1, hidden=HIDDEN)
    turned = msgspec.structs.replace(layout, tensors=layout.tensors[::-1])
    assert isinstance(turned, SourceLayout)
    assert digest(turned, 2, weights) == digest(layout, 2, weights)


def test_any_other_weights_have_another():
    layout, weights = layout_of("fsdp"), checkpoint(1, hidden=HIDDEN)
    right = digest(layout, 2, weights, torch.float32)
    seen = {right, digest(layout, 2, weights, torch.bfloat16)}
    for name in weights:
        flipped = weights[name].clone()
        flipped.view(-1).view(torch.int32)[3] ^= 1 << 9
        seen.add(digest(layout, 2, {**weights, name: flipped}, torch.float32))
    assert len(seen) == 2 + len(weights)


def test_exchanged_tensors_have_another():
    layout, weights = layout_of("whole"), checkpoint(1, hidden=HIDDEN)
    first, second = next((a, b) for a in weights for b in weights if a < b and weights[a].shape == weights[b].shape)
    exchanged = {**weights, first: weights[second], second: weights[first]}
    assert digest(layout, 2, exchanged) != digest(layout, 2, weights)


def test_a_sample_has_none():
    assert digest(layout_of("fsdp"), 2, checkpoint(1, hidden=HIDDEN), selection=Selection.sample(1)) == ""


@pytest.mark.parametrize(
    ("regions", "counted"),
    [
        ([(0, 8)], True),
        ([(0, 4), (4, 8)], True),
        ([(0, 5), (4, 8)], False),
        ([(0, 4)], False),
    ],
    ids=["whole", "cut", "overlapping", "in part"],
)
def test_elements_that_are_not_counted_once_have_none(regions, counted):
    layout = layout_of("whole")
    number = next(i for i, t in enumerate(layout.tensors) if len(t.shape) == 2)
    rows, columns = layout.tensors[number].shape
    cuts = [(a * rows // 8, b * rows // 8) for a, b in regions]  # given in eighths
    views = [("bfloat16", Region((a, 0), (b - a, columns), (1, 1))) for a, b in cuts]
    found = whole_model.region_coefficients(
        TensorIndex.of(layout), np.full(len(views), number), np.arange(len(views)), views
    )
    assert (found is not None) == counted


def test_a_part_that_is_missing_or_no_number_makes_no_digest():
    assert whole_model.model_digest([whole_model.to_bytes(1), whole_model.to_bytes((1 << 64) - 1)]) == "0" * 16
    assert whole_model.model_digest([whole_model.to_bytes(1), whole_model.to_bytes(None)]) == ""
    assert whole_model.model_digest([b"123456789"]) == ""


def test_a_version_and_a_name_are_told_apart():
    """Both are text of users, and together they read the same."""
    found = [whole_model.with_versions("0" * 16, kept) for kept in ({"b of c": "a"}, {"c": "a of b"})]
    assert found[0] != found[1]
