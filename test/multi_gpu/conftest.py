"""Tests that run on every trainer rank in step: `torchrun --nproc-per-node N -m pytest test/multi_gpu`.

An engine lives in the process of trainer rank 0, with processes of its own, and serves all tests of its configuration.
After each test the ranks exchange how it has ended, so that it fails on all of them, with what each has raised. Where
they may be out of step, all of them stop.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_reshard.errors import DeadlineExceeded

COMMAND = "torchrun --nproc-per-node N -m pytest test/multi_gpu"
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
collect_ignore_glob = [] if UNDER_TORCHRUN else ["test_*.py"]

_COLLECTIVE_S, _TEST_S = 180, 600  # ranks that are out of step notice it by the former
_exchange: Any = None  # a group of its own: another one may be in the middle of what has failed


def pytest_report_header() -> str:
    return f"run by: {COMMAND}" if not UNDER_TORCHRUN else ""


@pytest.hookimpl(trylast=True)  # after the plugin that writes
def pytest_configure(config: pytest.Config) -> None:
    """Lets trainer rank 0 alone write to the terminal."""
    if UNDER_TORCHRUN and os.environ["RANK"] != "0":
        config.pluginmanager.unregister(name="terminalreporter")
        silent = pytest.TerminalReporter(config, open(os.devnull, "w"))  # noqa: SIM115 (until the process ends)
        config.pluginmanager.register(silent, "terminalreporter")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts each engine once: its tests run one after the other."""
    if UNDER_TORCHRUN:
        from configurations import ENGINES

        items.sort(key=lambda item: ENGINES.index(item.callspec.params["live"]))  # type: ignore[attr-defined]
        for item in items:
            item.add_marker(pytest.mark.timeout(_TEST_S, method="thread"))  # which ends the process


class Engines:
    """Has one engine at a time. An engine that does not start fails all of its tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._live: Any = None
        self._failed: dict[str, str] = {}

    def get(self, configuration: Any) -> Any:
        from judged_engine import JudgedEngine

        if configuration.name in self._failed:
            pytest.fail(self._failed[configuration.name])
        if self._live is None or self._live.configuration is not configuration:
            self.stop()
            try:
                self._live = JudgedEngine(configuration, self._folder)
            except Exception as error:
                self._failed[configuration.name] = f"the engine {configuration.name} did not start: {error}"
                raise
        return self._live

    def stop(self) -> None:
        if self._live is not None:
            self._live.shutdown()
            self._live = None


@pytest.fixture(scope="session")
def _engines() -> Iterator[Engines]:
    global _exchange
    from configurations import GPUS, TRAINERS

    nccl = "nccl" if GPUS >= TRAINERS else "gloo"  # NCCL wants a GPU for each rank
    dist.init_process_group(f"cpu:gloo,cuda:{nccl}" if GPUS else "cpu:gloo", timeout=timedelta(seconds=_COLLECTIVE_S))
    if GPUS:
        torch.cuda.set_device(dist.get_rank() % GPUS)
        torch.cuda.init()
    _exchange = dist.new_group(backend="gloo", timeout=timedelta(seconds=_TEST_S))
    name = [tempfile.mkdtemp(prefix="multi-gpu-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    engines = Engines(Path(name[0]))
    yield engines
    engines.stop()
    if dist.get_rank() == 0:
        shutil.rmtree(name[0], ignore_errors=True)


def pytest_unconfigure() -> None:
    """Lets trainer rank 0 write its summary: torchrun ends all ranks when the first one ends with failures."""
    if _exchange is not None:
        with contextlib.suppress(RuntimeError):
            dist.barrier(group=_exchange)
        dist.destroy_process_group()


@pytest.fixture
def live(request: pytest.FixtureRequest, _engines: Engines) -> Any:
    """The engine of the test's configuration."""
    return _engines.get(request.param)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[Any]:
    """Fails a test on all ranks when it fails on one."""
    error = None
    try:
        result = yield
    except Exception as raised:
        error = raised
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, _told(error), group=_exchange)
    others = [f"trainer rank {rank}: {one[1]}" for rank, one in enumerate(told) if one and rank != dist.get_rank()]
    if any(one and one[0] for one in told):
        pyfuncitem.session.shouldstop = "the trainer ranks may be out of step: a collective has failed"
    if error is not None:
        for other in others:
            error.add_note(other)
        raise error
    assert not others, "\n".join(others)
    return result


def _told(error: Exception | None) -> tuple[bool, str] | None:
    """Returns whether a collective may have failed, and the error's text."""
    if error is None:
        return None
    lost = type(error) is RuntimeError or isinstance(error, (dist.DistError, DeadlineExceeded))
    return lost, "".join(traceback.format_exception(error))


def pytest_internalerror(excrepr: Any) -> None:
    """Shows it for silent ranks, too."""
    if UNDER_TORCHRUN:
        os.write(2, f"trainer rank {os.environ['RANK']}: {excrepr}\n".encode())
