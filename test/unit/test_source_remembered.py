"""The same tensors at the same addresses are known again, and nothing else is taken for them."""

import gc
import weakref

import pytest
import torch

from sglang_reshard.publisher import Publisher
from sglang_reshard.session import Session
from sglang_reshard.sources import describe
from sglang_reshard.sources.remembered import Remembered


def state():
    flat = torch.arange(24.0)
    return [("a", flat[:12].view(3, 4)), ("b", flat[12:]), ("c", torch.nn.Parameter(torch.ones(2, 2)))]


def remembered(given):
    return Remembered.of(given, describe(given, trainer_rank=0, global_ranks=(0,)).shards)


def test_written_in_place_they_are_the_same():
    given = state()
    known = remembered(given)
    with torch.no_grad():
        for _, tensor in given:
            tensor.mul_(2)
    assert known.same(given)
    assert known.same(list(given))


def moved(given):
    given[2][1].data = given[2][1].data.clone()
    return given


@pytest.mark.parametrize(
    "change",
    [
        moved,
        lambda given: given[:2],
        lambda given: given[::-1],
        lambda given: [("other", given[0][1]), *given[1:]],
        lambda given: [("a", given[0][1].detach()), *given[1:]],  # its memory, and another object
        lambda given: [("a", given[0][1].clone()), *given[1:]],
        lambda given: [(*given[0], object()), *given[1:]],
    ],
    ids=["moved", "fewer", "reversed", "renamed", "view", "copy", "spec"],
)
def test_anything_else_is_not(change):
    given = state()
    known = remembered(given)
    assert known.same(given)
    assert not known.same(change(given))


def test_a_transposed_tensor_in_the_same_memory_is_not():
    given = [("a", torch.nn.Parameter(torch.ones(2, 2)))]
    known = remembered(given)
    given[0][1].data = given[0][1].data.t()
    assert not known.same(given)


def test_tensors_that_stand_for_others_are_not_remembered():
    given = state()
    others = tuple(tensor.detach().clone() for _, tensor in given)
    assert Remembered.of(given, others) is None


def test_nothing_is_kept_alive():
    given = state()
    known = remembered(given)
    kept = weakref.ref(given[2][1])
    del given
    gc.collect()
    assert kept() is None
    assert not known.same(state())


def test_what_did_not_change_is_not_described_again(monkeypatch):
    publisher = Publisher(Session.host(), 0, (0,))
    given = state()
    first = publisher.publish(given, check_finite=False)
    monkeypatch.setattr("sglang_reshard.publisher.describe", None)  # a call would fail
    assert publisher.publish(given, check_finite=False) is first
    monkeypatch.undo()
    second = publisher.publish(moved(given), check_finite=False)
    assert (second.layout, second.source) == (first.layout, first.source)
    assert second.handles != first.handles
    with torch.no_grad():
        given[0][1][0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="a are not finite"):
        publisher.publish(given, check_finite=True)
    assert publisher.publish(given, check_finite=False) == second
    publisher.close()
