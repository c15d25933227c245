"""Which versions of SGLang are taken, and what each difference between them looks like from either side."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.patches import hooks, sglang_versions
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


def kept(**more: Any) -> Any:
    """What is left of two requests when it drops "a", which was not sent."""
    it = SimpleNamespace(rid_to_state={"a": 1, "b": 2}, **more)
    sglang_versions.drop_unsent_requests(it, ["a", "c"])
    return it.rid_to_state


AT_START = SimpleNamespace(weight_version="of the start")
OFFLOADED, NEW = SimpleNamespace(offload_tags={"weights"}), SimpleNamespace


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (lambda: sglang_versions.weight_version(NEW(server_args=AT_START)), "of the start"),
        (
            lambda: sglang_versions.weight_version(NEW(server_args=AT_START, config_value={"weight_version": "7"}.get)),
            "7",
        ),
        (lambda: kept(), {"b": 2}),
        (lambda: kept(_release_req_states_on_failure=None), {"a": 1, "b": 2}),
        (lambda: sglang_versions.offload_tags(OFFLOADED), {"weights"}),
        (lambda: sglang_versions.offload_tags(NEW(weight_updater=OFFLOADED)), {"weights"}),
        (lambda: sglang_versions.weight_update_session_open(OFFLOADED), False),
        (lambda: sglang_versions.weight_update_session_open(NEW(weight_updater=OFFLOADED)), False),
        (lambda: sglang_versions.weight_update_session_open(NEW(weight_updater=NEW(_session=None))), False),
        (lambda: sglang_versions.weight_update_session_open(NEW(weight_updater=NEW(_session=object()))), True),
        (lambda: sglang_versions.reports_token_versions(NEW()), False),
        (lambda: sglang_versions.reports_token_versions(NEW(record_weight_version_change=None)), True),
        (lambda: sglang_versions.batches(NEW(running_batch="a", last_batch=None, cur_batch="c")), ["a", "c"]),
        (lambda: sglang_versions.batches(NEW(running_batch="a", last_batch="b", cur_batch_for_debug="c")), ["a", "b"]),
        (lambda: sglang_versions.holds_kv_cache(NEW(req_pool_idx=None)), False),
        (lambda: sglang_versions.holds_kv_cache(NEW(req_pool_idx=0)), True),
        (lambda: sglang_versions.holds_kv_cache(NEW(req_pool_idx=None, kv=None)), False),
        (lambda: sglang_versions.holds_kv_cache(NEW(req_pool_idx=0, kv=NEW(kv_allocated_len=3))), True),
        (lambda: sglang_versions.holds_kv_cache(NEW(kv=NEW(holds_kv=False))), False),
        (lambda: sglang_versions.holds_kv_cache(NEW(kv=NEW(holds_kv=True))), True),
        (lambda: sglang_versions.holds_graphs(NEW()), False),
        (lambda: sglang_versions.holds_graphs(NEW(graph_runner=None, piecewise_cuda_graph_runner=None)), False),
        (lambda: sglang_versions.holds_graphs(NEW(graph_runner=object())), True),
        (lambda: sglang_versions.holds_graphs(NEW(decode_cuda_graph_runner=None, prefill_cuda_graph_runner=1)), True),
    ],
)
def test_a_difference_is_read_on_either_side_of_it(found: Any, expected: Any) -> None:
    assert found() == expected


# -- who carries the patches


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "installed_version", lambda: __version__)


@pytest.mark.usefixtures("whole")
def test_an_engine_that_carries_them_throughout_may_be_updated() -> None:
    assert hooks.mismatch([{VERSION_KEY: __version__}] * 2) == ""


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
    assert hooks.mismatch([{VERSION_KEY: __version__}, state]).startswith(f"{says}, where {__version__} is needed")


def test_so_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "installed_version", lambda: f"{__version__} without a.hook")
    assert "the tokenizer manager has" in hooks.mismatch([{VERSION_KEY: __version__}])


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
