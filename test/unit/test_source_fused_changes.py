"""Stacks and tensors whose holdings are stated are known again by the objects that say so."""

import pytest
import torch

from sglang_reshard.layout.regions import Box
from sglang_reshard.protocol.session import Session
from sglang_reshard.sources import FusedSlice, FusedTensor, blocks
from sglang_reshard.trainer.publisher import ShardPublisher
from test_source_remembered import remembered


def stack():
    return FusedTensor((("a", FusedSlice((0, 0), (1, 4), (1,))), ("b", FusedSlice((1, 0), (2, 4), (1,)))))


def held():
    return blocks((2, 2), [Box((0, 0), (2, 2))])


def stacked_and_held():
    return [("stack", torch.ones(2, 4), stack()), ("c", torch.ones(2, 2), held()), ("d", torch.ones(2), None)]


def test_stacks_written_in_place_are_the_same():
    given = stacked_and_held()
    known = remembered(given)
    for _, tensor, _ in given:
        tensor.mul_(2)
    assert known.unchanged([(name, tensor.detach(), third) for name, tensor, third in given])


@pytest.mark.parametrize(
    "change",
    [
        lambda given: [(*given[0][:2], stack()), *given[1:]],
        lambda given: [given[0], (*given[1][:2], held()), *given[2:]],
        lambda given: [given[0][:2], *given[1:]],
        lambda given: [("stack", given[0][1].clone(), given[0][2]), *given[1:]],
        lambda given: [given[0], ("c", given[1][1].t(), given[1][2]), *given[2:]],
    ],
    ids=["another stack", "another Held", "a stack no more", "moved", "transposed"],
)
def test_stacks_that_changed_are_not(change):
    given = stacked_and_held()
    known = remembered(given)
    assert known.unchanged(given)
    assert not known.unchanged(change(given))


def test_a_stack_that_did_not_change_is_not_described_again(monkeypatch):
    publisher = ShardPublisher(Session.host(), 0, (0,))
    given = stacked_and_held()
    first = publisher.publish(given, check_finite=False)
    assert [t.name for t in first.source.tensors] == ["a", "b", "c", "d"]
    assert [shard.numel() for shard in publisher.shards(given)] == [4, 4, 4, 2]
    monkeypatch.setattr("sglang_reshard.trainer.publisher.describe", None)  # a call would fail
    assert publisher.publish(list(given), check_finite=False) is first
    publisher.close()
