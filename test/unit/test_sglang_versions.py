"""Which versions of SGLang are taken, and what each difference between them looks like from either side."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.patches import hook_check, sglang_versions
from sglang_reshard.version import VERSION_KEY, __version__

# -- versions


@pytest.mark.parametrize("version", ["0.5.12", "0.5.12+reshard.1", "0.5.17.post1", "0.5.20rc0", "0.5.23"])
def test_a_version_of_the_range_is_taken_without_a_word(told: pytest.LogCaptureFixture, version: str) -> None:
    sglang_versions.check(version)
    assert told.messages == []


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.5.24", "newer than"),
        ("1.0", "newer than"),
        ("0.0.0.dev0", "SGLang 0.0.0.dev0 is an unknown release"),
        ("main", "SGLang main is an unknown release"),
    ],
)
def test_a_version_that_nobody_tested_is_warned_of(told: pytest.LogCaptureFixture, version: str, says: str) -> None:
    sglang_versions.check(version)
    (message,) = told.messages
    assert version in message
    assert says in message
    assert "0.5.12 to 0.5.23" in message


@pytest.mark.parametrize("version", ["0.5.11", "0.5.11.post2", "0.4.9"])
def test_an_older_one_is_refused(version: str) -> None:
    with pytest.raises(Unsupported, match=f"{version} is older than 0.5.12"):
        sglang_versions.check(version)


# -- differences; what SGLang has on either side of each


class Socket:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send_pyobj(self, message: Any) -> None:
        self.sent.append(message)


def test_messages_to_the_schedulers() -> None:
    old = SimpleNamespace(send_to_scheduler=Socket())
    sglang_versions.send_to_schedulers(old, "message")
    assert old.send_to_scheduler.sent == ["message"]
    sent: list[Any] = []
    new = SimpleNamespace(send_to_scheduler=Socket(), _dispatch_to_scheduler=sent.append)
    sglang_versions.send_to_schedulers(new, "message")
    assert (sent, new.send_to_scheduler.sent) == (["message"], [])


def test_the_version_of_the_weights() -> None:
    server_args = SimpleNamespace(weight_version="that of the start")
    assert sglang_versions.weight_version(SimpleNamespace(server_args=server_args)) == "that of the start"
    new = SimpleNamespace(server_args=server_args, config_value={"weight_version": "7"}.get)
    assert sglang_versions.weight_version(new) == "7"


def test_requests_that_are_not_sent() -> None:
    old = SimpleNamespace(rid_to_state={"a": 1, "b": 2})
    sglang_versions.drop_unsent_requests(old, ["a", "c"])
    assert old.rid_to_state == {"b": 2}
    new = SimpleNamespace(rid_to_state={"a": 1}, _release_req_states_on_failure=None)
    sglang_versions.drop_unsent_requests(new, ["a"])
    assert new.rid_to_state == {"a": 1}


def test_offloaded_weights() -> None:
    assert sglang_versions.offload_tags(SimpleNamespace(offload_tags={"weights"})) == {"weights"}
    new = SimpleNamespace(weight_updater=SimpleNamespace(offload_tags={"weights"}))
    assert sglang_versions.offload_tags(new) == {"weights"}


def test_open_sessions() -> None:
    assert not sglang_versions.weight_update_session_open(SimpleNamespace(offload_tags=set()))
    assert not sglang_versions.weight_update_session_open(
        SimpleNamespace(weight_updater=SimpleNamespace(offload_tags=set()))
    )
    assert not sglang_versions.weight_update_session_open(
        SimpleNamespace(weight_updater=SimpleNamespace(_session=None))
    )
    assert sglang_versions.weight_update_session_open(
        SimpleNamespace(weight_updater=SimpleNamespace(_session=object()))
    )


def test_the_version_that_requests_are_told() -> None:
    sglang_versions.record_weight_version(SimpleNamespace(), "7")
    told: list[str] = []
    new = SimpleNamespace(record_weight_version_change=lambda new_version: told.append(new_version))
    sglang_versions.record_weight_version(new, "7")
    sglang_versions.record_weight_version(new, None)
    assert told == ["7"]


def test_batches_in_flight() -> None:
    old = SimpleNamespace(running_batch="a", last_batch=None, cur_batch="c")
    assert sglang_versions.batches(old) == ["a", "c"]
    new = SimpleNamespace(running_batch="a", last_batch="b", cur_batch_for_debug="c")
    assert sglang_versions.batches(new) == ["a", "b"]


@pytest.mark.parametrize("row", [None, 0, 3])
def test_requests_that_have_a_part_of_the_cache(row: int | None) -> None:
    assert sglang_versions.holds_kv_cache(SimpleNamespace(req_pool_idx=row)) == (row is not None)
    assert sglang_versions.holds_kv_cache(SimpleNamespace(kv=SimpleNamespace(holds_kv=row is not None))) == (
        row is not None
    )


# -- who carries the patches


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_check, "installed_version", lambda: __version__)


@pytest.mark.usefixtures("whole")
def test_an_engine_that_carries_them_throughout_may_be_updated() -> None:
    assert hook_check.mismatch([{VERSION_KEY: __version__}] * 2) == ""


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, "scheduler 1 has no sglang-reshard"),
        ({VERSION_KEY: "0.0.7"}, "scheduler 1 has sglang-reshard 0.0.7"),
        (
            {VERSION_KEY: f"{__version__} without a.hook"},
            f"scheduler 1 has sglang-reshard {__version__} without a.hook",
        ),
    ],
)
def test_a_process_without_them_is_named(state: dict[str, str], says: str) -> None:
    assert hook_check.mismatch([{VERSION_KEY: __version__}, state]).startswith(f"{says}, where {__version__} is needed")


def test_so_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_check, "installed_version", lambda: f"{__version__} without a.hook")
    assert "the tokenizer manager has" in hook_check.mismatch([{VERSION_KEY: __version__}])


def test_sglang_s_own_refusals_of_online_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules declare some by an attribute; its weight updater, from 0.5.17 on, knows the others."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert sglang_versions.online_updates_refused(model) == ""
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater"
    asked = SimpleNamespace(_unsupported_derived_weight_cache_error=lambda of: "mHC" if of is model else None)
    monkeypatch.setitem(sys.modules, updater, asked)
    assert sglang_versions.online_updates_refused(model) == "mHC"
    asked._unsupported_derived_weight_cache_error = lambda _: None
    assert sglang_versions.online_updates_refused(model) == ""
    asked._unsupported_derived_weight_cache_error = lambda: "an option of 0.5.17"
    assert sglang_versions.online_updates_refused(model) == "an option of 0.5.17"
    asked._unsupported_derived_weight_cache_error = lambda: None
    assert sglang_versions.online_updates_refused(model) == ""
    model[0]._derived_weight_cache_error = "packed"
    assert sglang_versions.online_updates_refused(model) == "0: packed"


@pytest.mark.parametrize(
    ("runners", "holds"),
    [
        ({"graph_runner": None, "piecewise_cuda_graph_runner": None}, False),
        ({"graph_runner": object()}, True),
        ({"decode_cuda_graph_runner": None, "prefill_cuda_graph_runner": object()}, True),
        ({}, False),
    ],
)
def test_who_holds_cuda_graphs(runners: dict[str, Any], holds: bool) -> None:
    assert sglang_versions.holds_graphs(SimpleNamespace(**runners)) is holds
