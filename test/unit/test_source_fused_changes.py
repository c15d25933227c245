"""Change detection of fused and explicitly sharded tensors, by their descriptions."""

import pytest
import torch

from sglang_reshard.layout.regions import Box
from sglang_reshard.protocol.session import Session
from sglang_reshard.sources import FusedSlice, FusedTensor, blocks
from sglang_reshard.trainer.publisher import ShardPublisher
from test_source_changes import detector


def fused_tensor(first="a"):
    return FusedTensor(((first, FusedSlice((0, 0), (1, 4), (1,))), ("b", FusedSlice((1, 0), (2, 4), (1,)))))


def explicit(rows=2):
    return blocks((2, 2), [Box((0, 0), (rows, 2))] * (2 // rows))


def fused_and_explicit():
    return [
        ("fused_tensor", torch.ones(2, 4), fused_tensor()),
        ("c", torch.ones(2, 2), explicit()),
        ("d", torch.ones(2), None),
    ]


def test_fused_tensors_written_in_place_are_unchanged():
    given = fused_and_explicit()
    known = detector(given)
    for _, tensor, _ in given:
        tensor.mul_(2)
    assert known.unchanged([(name, tensor.detach(), third) for name, tensor, third in given])


def test_equal_descriptions_are_unchanged():
    given = fused_and_explicit()
    fused, explicitly, whole = given
    assert detector(given).unchanged([(*fused[:2], fused_tensor()), (*explicitly[:2], explicit()), whole])


@pytest.mark.parametrize(
    "change",
    [
        lambda given: [(*given[0][:2], fused_tensor("other")), *given[1:]],
        lambda given: [given[0], (*given[1][:2], explicit(rows=1)), *given[2:]],
        lambda given: [given[0][:2], *given[1:]],
        lambda given: [("fused_tensor", given[0][1].clone(), given[0][2]), *given[1:]],
        lambda given: [given[0], ("c", given[1][1].t(), given[1][2]), *given[2:]],
    ],
    ids=["another fused tensor", "another sharding", "no longer fused", "moved", "transposed"],
)
def test_changed_fused_tensors_are_changed(change):
    given = fused_and_explicit()
    known = detector(given)
    assert known.unchanged(given)
    assert not known.unchanged(change(given))


def test_unchanged_fused_tensors_are_not_described_again(monkeypatch):
    publisher = ShardPublisher(Session.host(), 0, (0,))
    given = fused_and_explicit()
    first = publisher.publish(given)
    assert [t.name for t in first.source.tensors] == ["a", "b", "c", "d"]
    assert [shard.numel() for shard in publisher.shards(given)] == [4, 4, 4, 2]
    monkeypatch.setattr("sglang_reshard.trainer.publisher.describe", None)  # a call would fail
    assert publisher.publish(list(given)) is first
    publisher.close()
