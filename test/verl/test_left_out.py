"""Replicas that a sync leaves out: which they are, and how they come back. Their servers are stand-ins here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from sglang_reshard.errors import EngineRefused
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput
from sglang_reshard.protocol.weights_info import WeightsInfo
from sglang_reshard.trainer.update_sender import UpdateSender
from sglang_reshard.verl import replica_sender, replica_weights
from sglang_reshard.verl.replica_weights import LeftOut, pull_weights
from sglang_reshard.verl.settings import Settings

BOTH = {"a": "u/a", "b": "u/b"}


class Servers:
    """Versions by URL; "" for one that was never updated. `refusing` take nothing, `dead` do not answer.

    info  what else a server says of its weights
    """

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self.info: dict[str, dict[str, Any]] = {}
        self.refusing: set[str] = set()
        self.dead: set[str] = set()
        self.pulls: list[tuple[str, str]] = []

    def client(self, url: str) -> ServerStandIn:
        return ServerStandIn(self, url)


class ServerStandIn:
    def __init__(self, servers: Servers, url: str) -> None:
        self._all, self._url = servers, url

    def weights_info(self) -> WeightsInfo:
        if self._url in self._all.dead:
            raise EngineRefused(f"{self._url} did not answer")
        version = self._all.versions[self._url]
        info = self._all.info.get(self._url, {})
        return WeightsInfo(version=version, package_version="1", engine_ranks=2 if version else 0, **info)

    def pull_weights(self, source: str) -> DistributedUpdateWeightsOutput:
        self._all.pulls.append((source, self._url))
        if self._url in self._all.refusing:
            return DistributedUpdateWeightsOutput(success=False, message="offloaded")
        self._all.versions[self._url] = self._all.versions[source]
        return DistributedUpdateWeightsOutput(success=True, message="")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    found = Servers()
    monkeypatch.setattr(replica_weights, "ServerClient", found.client)
    return found


def wait(left_out: LeftOut) -> tuple[str, ...]:
    thread = left_out._thread
    if thread is not None:
        thread.join(10)
    return left_out.replicas


def test_one_that_has_taken_the_weights_is_back(servers: Servers) -> None:
    servers.versions = {"u/a": "7", "u/b": "6"}
    left_out = LeftOut()
    left_out.sync_ended(BOTH, {"b"})
    assert wait(left_out) == ()
    assert servers.pulls == [("u/a", "u/b")]
    assert servers.versions["u/b"] == "7"


def test_one_that_cannot_take_them_stays_out_and_is_asked_after_each_sync(servers: Servers) -> None:
    servers.versions, servers.refusing = {"u/a": "7", "u/b": "6"}, {"u/b"}
    left_out = LeftOut()
    left_out.sync_ended(BOTH, {"b"})
    assert wait(left_out) == ("b",)
    servers.versions["u/a"] = "8"
    left_out.sync_ended(BOTH, ())
    assert wait(left_out) == ("b",)
    assert len(servers.pulls) == 2
    servers.refusing.clear()
    left_out.sync_ended(BOTH, ())
    assert wait(left_out) == ()


def test_one_that_was_removed_is_forgotten(servers: Servers) -> None:
    servers.versions, servers.dead = {"u/a": "7"}, {"u/b"}
    left_out = LeftOut()
    left_out.sync_ended(BOTH, {"b"})
    assert wait(left_out) == ("b",)
    left_out.sync_ended({"a": "u/a"}, ())
    assert wait(left_out) == ()


def test_new_replicas_pull_from_the_first_that_answers_and_was_updated(servers: Servers) -> None:
    servers.versions = {"u/a": "", "u/b": "6", "u/c": "7", "u/d": "", "u/e": "7"}
    servers.dead = {"u/b"}
    pull_weights(["u/a", "u/b", "u/c"], ["u/d", "u/e"])
    assert sorted(servers.pulls) == [("u/c", "u/d"), ("u/c", "u/e")]
    assert servers.versions["u/d"] == "7"


@pytest.mark.parametrize(
    ("own", "live", "same"),
    [
        ({}, {}, False),
        ({"digest": "d"}, {"digest": "d"}, True),
        ({"digest": "d"}, {"digest": "e"}, False),
        ({"session": "s", "update": 3}, {"session": "s", "update": 3}, True),
        ({"session": "s", "update": 2}, {"session": "s", "update": 3}, False),
        ({"digest": "d", "torn": "half"}, {"digest": "d"}, False),
    ],
)
def test_an_equal_version_alone_heals_nothing(
    servers: Servers, own: dict[str, Any], live: dict[str, Any], same: bool
) -> None:
    servers.versions, servers.info = {"u/a": "7", "u/b": "7"}, {"u/a": live, "u/b": own}
    left_out = LeftOut()
    left_out.sync_ended(BOTH, {"b"})
    assert wait(left_out) == ()
    assert servers.pulls == ([] if same else [("u/a", "u/b")])


def test_one_that_is_back_before_the_next_sync_takes_part_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`MultiEngineSender` excludes an engine that failed until a call of `set_engines` was without it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sender = replica_sender.ReplicaSender(Settings(on_failure="exclude", interface="127.0.0.1"))
        address = sender.host()
        assert address is not None
        sender.set_replicas(address, BOTH)
        engines = sender._sender
        assert engines is not None

        def fails(self: UpdateSender, *_: Any) -> dict[int, Any]:
            updated = msgspec.structs.replace(UpdateReport.failed("", None), success=True)
            return {0: updated, 1: EngineRefused("offloaded")}

        monkeypatch.setattr(UpdateSender, "update_engines", fails)
        sender._sync(engines, SimpleNamespace(is_param_offload_enabled=False), [], False, 1, 0.0)
        assert (engines.engines, sender.failed) == (("a",), {"b"})
        sender.set_replicas(address, BOTH)
        assert engines.engines == ("a", "b")
        engines.close()
    finally:
        dist.destroy_process_group()


def test_nobody_is_asked_before_the_first_sync(servers: Servers) -> None:
    servers.versions = {"u/a": "", "u/b": ""}
    pull_weights(["u/a"], ["u/b"])
    pull_weights([], ["u/b"])
    assert servers.pulls == []
