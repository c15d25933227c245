"""Fixtures and hooks of all tests."""

import logging
import os
from pathlib import Path

import pytest
from hypothesis import settings

from support.sweep import SWEEP, examples

# How long one example takes says nothing here: machines are shared, and the first one imports torch.
settings.register_profile("patient", deadline=None, max_examples=examples(100))
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get("SGLANG_RESHARD_SUMMARY"):
        from support.summary import Summary

        config.pluginmanager.register(Summary(Path(path)))
    if path := os.environ.get("SGLANG_RESHARD_TRAINERS"):
        from support.trainer_rows import TrainerRows

        config.pluginmanager.register(TrainerRows(Path(path)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests and params marked `sweep` unless SGLANG_RESHARD_SWEEP=1."""
    if SWEEP:
        return
    sweep = [item for item in items if item.get_closest_marker("sweep")]
    if sweep:
        config.hook.pytest_deselected(items=sweep)
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]


@pytest.fixture
def told(caplog, monkeypatch):
    """What this package logs from warnings on, whatever libraries that ran before have made of the root logger."""
    own = logging.getLogger("sglang_reshard")
    monkeypatch.setattr(own, "propagate", False)
    monkeypatch.setattr(own, "handlers", [caplog.handler])
    caplog.set_level(logging.WARNING, own.name)
    return caplog
