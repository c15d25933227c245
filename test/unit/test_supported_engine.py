"""Engines that cannot be updated are refused by the name of the option that they were started with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_reshard.patches import engine, supported_engine
from sglang_reshard.patches.supported_engine import unsupported_reason, warn_if_unsupported


def arguments(**options: Any) -> SimpleNamespace:
    """Those that all versions of SGLang know."""
    plain = {
        "dp_size": 1,
        "enable_dp_attention": False,
        "pp_size": 1,
        "disaggregation_mode": "null",
        "tokenizer_worker_num": 1,
    }
    return SimpleNamespace(**plain | options)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_RUST_SERVER", raising=False)
    supported_engine._warn.cache_clear()


@pytest.mark.parametrize(
    "options", [{}, {"dp_size": 2}, {"pp_size": 4}, {"use_ray": False, "weight_cache_mode": "off"}]
)
def test_an_engine_that_can_be_updated(options: dict[str, Any]) -> None:
    assert unsupported_reason(arguments(**options)) == ""


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("True", True), ("yes", True), ("0", False), ("", False)])
def test_the_rust_server_is_named(monkeypatch: pytest.MonkeyPatch, value: str, refused: bool) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", value)
    assert unsupported_reason(arguments()).startswith("SGLANG_RUST_SERVER") == refused


def test_the_log_of_the_start_says_what_updates_do_not_reach(told: pytest.LogCaptureFixture) -> None:
    warn_if_unsupported(arguments(language_only=False))
    assert told.messages == []
    warn_if_unsupported(arguments(language_only=True))
    (message,) = told.messages
    assert "can be updated, but only in part: encoder servers" in message


@pytest.mark.parametrize("call", ["by position", "by name"])
def test_the_log_of_the_start_says_it_once(told: pytest.LogCaptureFixture, call: str) -> None:
    """Two of SGLang's functions are hooked, which hand on the arguments either way."""
    args = arguments(use_ray=True)
    for _ in range(2):
        if call == "by position":
            engine.check_arguments(SimpleNamespace, args, "ports")
        else:
            engine.check_arguments(SimpleNamespace, server_args=args, port_args="ports")
    (message,) = told.messages
    assert "cannot update its weights: use_ray" in message


def test_arguments_that_nobody_understands_do_not_keep_an_engine_from_starting(told: pytest.LogCaptureFixture) -> None:
    engine.check_arguments(SimpleNamespace, object())
    (message,) = told.messages
    assert "its first update will show it" in message
