"""Fixtures and hooks of all tests."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import setuptools  # noqa: F401  (before anything imports distutils, which it replaces: it fails if it comes later)
from hypothesis import settings

from support import zygote
from support.fault_rows import FaultTable
from support.sweep import SWEEP, examples

_OF_ENGINES = ("gw0", "gw1")  # pytest-xdist's names of its first workers
_IMPORTED_BEFORE = frozenset(sys.modules)  # by plugins of pytest
# How long one example takes says nothing here: machines are shared, and the first one imports torch.
settings.register_profile("patient", deadline=None, max_examples=examples(100))
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """Registers what gathers results, in the process that gets all reports: a worker of pytest-xdist does not."""
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(FaultTable())
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
    """Deselects tests and params marked `sweep` unless SGLANG_RESHARD_SWEEP=1, and those of the matrix likewise.

    Unit tests come last: their files are the shortest, so that several workers end at about the same time.
    """
    matrix = "SGLANG_RESHARD_MATRIX" in os.environ
    runs = {"sweep": SWEEP, "matrix": matrix, "releases": SWEEP or matrix}
    left_out = [marker for marker, chosen in runs.items() if not chosen]
    kept: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        (deselected if any(map(item.get_closest_marker, left_out)) else kept).append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
    items[:] = sorted(kept, key=lambda item: "unit" in item.path.parts)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tells of a test module that imports SGLang: engines that this process starts would not be a CPU's."""
    if "sglang" in sys.modules and "sglang" not in _IMPORTED_BEFORE:
        raise pytest.UsageError(
            "a test module imports SGLang when it is collected. Import it in the test, after `cpu_host.activate`"
        )
    gc.freeze()  # so that collections, which many tests ask for, look at what tests make


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives a worker whole files, and one of them all of test/verl: no two clusters of Ray run at a time.

    Two workers begin with the engines, and others with the unit tests: engines of three tests may need too much memory.
    """
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "test/verl" if file.startswith("test/verl/") else file

        def _assign_work_unit(self, node: Any) -> None:
            if node.gateway.id not in _OF_ENGINES:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False  # files begin in the order of collection
    return Files(config, log)


@pytest.fixture(scope="module")
def forks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes that a module starts have imported SGLang already, and verl for its tests; see support/zygote.py."""
    with zygote.forks(*["verl"] * ("verl" in request.path.parts), "cpu"):
        yield


@pytest.fixture
def told(caplog, monkeypatch):
    """What this package logs from warnings on, whatever libraries that ran before have made of the root logger."""
    own = logging.getLogger("sglang_reshard")
    monkeypatch.setattr(own, "propagate", False)
    monkeypatch.setattr(own, "handlers", [caplog.handler])
    caplog.set_level(logging.WARNING, own.name)
    return caplog
