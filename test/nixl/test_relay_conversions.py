"""An engine is lost while weights that are converted together have arrived in part: all of them are read again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from sglang_reshard.routes.nixl.streams import Stream
from sglang_reshard.routes.relay.engine import RelayedStream
from sglang_reshard.routes.relay.progress import RelayLost
from support.nixl_env import needs_nixl, use_nixl
from support.several_engines import relaying_sender, sends_of
from support.sweep import sweep
from support.toy import ToyRank, checkpoint
from support.toy_repacking import Repacking, live_tensors, started, weights
from support.toy_serving import receiver_of
from support.world import run_world

pytestmark = needs_nixl
LAYERS, ROWS, UPDATES = 6, 24, 2


class Model(torch.nn.Module):
    """Layers that are repacked, between halves of a model that engines pass on to each other."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.packed = started(Repacking(LAYERS, ROWS), weights(version, LAYERS, ROWS))
        self.toy = ToyRank(0, 1)

    def load_weights(self, named: Any) -> None:
        of: dict[str, list[Any]] = {"packed": [], "toy": []}
        for name, tensor in named:
            part, _, rest = name.partition(".")
            of[part].append((rest, tensor))
        self.packed.load_weights(of["packed"])
        self.toy.load_weights(of["toy"])


def given(version: int) -> dict[str, torch.Tensor]:
    """In an order in which a layer's tensors are far from each other, so that messages bring one without the other."""
    packed = {f"packed.{n}": t for n, t in weights(version, LAYERS, ROWS).items()}
    apart = dict(sorted(packed.items(), key=lambda item: item[0].endswith("bound")))
    return apart | {f"toy.{n}": t for n, t in checkpoint(version).items()}


def train(trainer: Any, _after: int) -> list[Any]:
    use_nixl()
    sender, _host = relaying_sender(trainer, bucket_bytes=1024)
    sender.set_engines(sends_of(trainer, (1, 1)))
    reports = [sender.update(given(version).items(), weight_version=str(version)) for version in range(1, UPDATES + 1)]
    sender.close()
    return reports


def serve(engine: int, _size: int, requests: Any, after: int) -> list[list[str]]:
    """Engine 0 loses the other one in the last update, when `after` messages of the trainer have arrived."""
    use_nixl()
    model = Model(0)
    receiver = receiver_of(model, 0, 1)
    seen = []
    for version, request in enumerate(requests, start=1):
        with losing(after) if (engine, version) == (0, UPDATES) else nullcontext():
            requests.answer(receiver.update(request))
        differing = model.toy.differing(checkpoint(version))
        packed = live_tensors(started(Repacking(LAYERS, ROWS), weights(version, LAYERS, ROWS)))
        seen.append(differing + [n for n, t in live_tensors(model.packed).items() if not torch.equal(t, packed[n])])
    return seen


@contextmanager
def losing(after: int) -> Iterator[None]:
    """Within it nothing is passed on, and the other engine is lost once so many messages of the trainer are there."""
    from_trainer: list[Stream] = []
    begin = Stream.begin

    def begun(self: Stream, update: int) -> None:
        begin(self, update)
        if not isinstance(self, RelayedStream):
            from_trainer.append(self)

    def advance(_: RelayedStream) -> bool:
        if from_trainer[0].finished >= after:
            raise RelayLost("replica 1", "is lost to the test")
        return False

    with mock.patch.object(Stream, "begin", begun), mock.patch.object(RelayedStream, "advance", advance):
        yield


@pytest.mark.parametrize("after", [sweep(1), sweep(3), 5, sweep(8)])
def test_what_has_arrived_in_part_is_read_again(after: int) -> None:
    (told,), seen = run_world(1, 2, train, serve, after)
    assert "is lost to the test" in told[-1]["replica 0"].message
    assert seen == [[[]] * UPDATES] * 2
