"""Nothing is left that means pages which are gone: what was registered is dropped, and registered again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_reshard.patches import model_runner
from sglang_reshard.protocol.session import Session
from sglang_reshard.trainer.publisher import ShardPublisher
from sglang_reshard.trainer.worker import EngineTransfers, _Prepared


class Receiver:
    def __init__(self, fails: bool = False) -> None:
        self.released, self._fails = 0, fails

    def release_pages(self) -> None:
        self.released += 1
        if self._fails:
            raise OSError("not deregistered")


@pytest.mark.parametrize(("tag", "released"), [("weights", 1), (None, 1), ("kv_cache", 0), ("cuda_graph", 0)])
def test_receivers_are_told_before_the_memory_saver_releases_weights(monkeypatch, told, tag, released):
    receivers = [Receiver(fails=True), Receiver()]
    monkeypatch.setattr(model_runner, "receivers", receivers)
    model_runner.before_pause(object(), tag=tag)
    model_runner.before_pause(object(), tag)
    assert [receiver.released for receiver in receivers] == [2 * released] * 2
    assert len([r for r in told.records if "could not be dropped before" in r.message]) == 2 * released


# -- a trainer rank's memory without handles, as expandable segments are: other pages may be at the same addresses


def published(gpu, shard):
    gpu.without_handles = "its GPU memory has no CUDA IPC handle"
    publisher = ShardPublisher(Session.host(), 0, (0,))
    return publisher, publisher.publish([("w", shard)])


@pytest.mark.parametrize("holds_pages", [True, False])
def test_what_is_registered_of_memory_without_handles_is_registered_again_once_torch_has_unmapped_any(gpu, holds_pages):
    shard = gpu.allocate(64)
    publisher, first = published(gpu, shard)
    end: Any = SimpleNamespace(holds_pages=holds_pages)
    transfers = EngineTransfers(Session.host(), 0, 0, {})
    command: Any = SimpleNamespace(transfer="7/abc")
    transfers._prepared = _Prepared(command, first, end, connected=True)
    assert publisher.publish([("w", shard)]) is first
    assert transfers.prepared_transfer(first) == "7/abc"
    gpu.freed += 1
    second = publisher.publish([("w", shard)])
    assert (second.identity, second.handles) == (first.identity, first.handles)
    assert transfers.prepared_transfer(second) == ("" if holds_pages else "7/abc")
