"""The setting `check_finite` refuses NaN and infinities before a sync sends anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_reshard.control import Address
from sglang_reshard.errors import Mismatch
from sglang_reshard.verl import replica_sender
from sglang_reshard.verl.settings import Settings

ENGINE = SimpleNamespace(is_param_offload_enabled=False)


class Sender:
    """Stands in for the sender to all replicas; keeps what it is given."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.sent: list[Any] = []

    def wait_for_background(self) -> None: ...

    def set_engines(self, engines: Any) -> None: ...

    def update(self, named_tensors: Any, *options: Any, **_: Any) -> dict[str, Any]:
        self.sent.append((named_tensors, options))
        return {}


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("check", [True, False])
def test_nothing_is_sent_of_a_tensor_with_a_nan(one_rank: None, monkeypatch: pytest.MonkeyPatch, check: bool) -> None:
    weight = torch.zeros(2, 3)
    sender = Sender()

    @contextmanager
    def tensors(_: Any, engine: Any) -> Iterator[Any]:
        yield [("w", weight)], False, False

    monkeypatch.setattr(replica_sender, "MultiEngineSender", lambda *_, **__: sender)
    monkeypatch.setattr(replica_sender.EngineShards, "tensors", tensors)
    replicas = replica_sender.ReplicaSender(Settings(check_finite=check))
    replicas.set_replicas(Address("s", "127.0.0.1", 1, "00"), {})
    replicas.update(ENGINE, 1)
    assert len(sender.sent) == 1
    weight[1, 0] = float("nan")
    if not check:
        replicas.update(ENGINE, 2)
        assert len(sender.sent) == 2
        return
    with pytest.raises(Mismatch, match=r"elements of w on this rank are not finite .* set check_finite=False"):
        replicas.update(ENGINE, 2)
    assert len(sender.sent) == 1
    assert replicas.global_steps == 1
