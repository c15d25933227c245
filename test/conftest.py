"""Fixtures and hooks of all tests."""

import logging
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from support.sweep import SWEEP, examples

_IMPORTED_BEFORE = frozenset(sys.modules)  # by plugins of pytest
# How long one example takes says nothing here: machines are shared, and the first one imports torch.
settings.register_profile("patient", deadline=None, max_examples=examples(100))
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get("SGLANG_RESHARD_SUMMARY"):
        from support.summary import Summary

        config.pluginmanager.register(Summary(Path(path)))
    if path := os.environ.get("SGLANG_RESHARD_TRAINERS"):
        from support.recorded_rows import RecordedRows

        order = ("trainer", "way", "transport")
        config.pluginmanager.register(RecordedRows(Path(path), "trainer", "make test-trainers", order))
    if path := os.environ.get("SGLANG_RESHARD_MATRIX"):
        from support.recorded_rows import RecordedRows

        order = ("kind", "sglang", "python", "torch")
        config.pluginmanager.register(RecordedRows(Path(path), "matrix", "make test-matrix", order))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests and params marked `sweep` unless SGLANG_RESHARD_SWEEP=1, and those of the matrix likewise."""
    runs = {"sweep": SWEEP, "matrix": "SGLANG_RESHARD_MATRIX" in os.environ}
    left_out = [marker for marker, chosen in runs.items() if not chosen]
    kept: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        (deselected if any(map(item.get_closest_marker, left_out)) else kept).append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tells of a test module that imports SGLang: engines that this process starts would not be a CPU's."""
    if "sglang" in sys.modules and "sglang" not in _IMPORTED_BEFORE:
        raise pytest.UsageError(
            "a test module imports SGLang when it is collected. Import it in the test, after `cpu_host.activate`"
        )


@pytest.fixture
def told(caplog, monkeypatch):
    """What this package logs from warnings on, whatever libraries that ran before have made of the root logger."""
    own = logging.getLogger("sglang_reshard")
    monkeypatch.setattr(own, "propagate", False)
    monkeypatch.setattr(own, "handlers", [caplog.handler])
    caplog.set_level(logging.WARNING, own.name)
    return caplog
