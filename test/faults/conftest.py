"""What tests of faults share: the rows that they add to the table, and the processes of a scene."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from multiprocessing import forkserver

import pytest

from support.fault_rows import PROPERTY, Row
from support.left_behind import Belongings
from support.player import Hang
from support.scenes import Scene

Case = Callable[..., AbstractContextManager[Row]]
_rows = pytest.StashKey[list[Row]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_rows] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Attaches the rows of a test to its last report: what a module's processes leave is known no earlier."""
    if call.when == "teardown":
        rows = item.config.stash[_rows]
        item.user_properties += [(PROPERTY, asdict(row)) for row in rows]
        rows.clear()


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    """A row of the table, to be filled in by what goes on inside."""

    @contextmanager
    def tried(fault: str, phase: str, transport: str, group: str = "") -> Iterator[Row]:
        row = Row(fault, phase, transport, group=group)
        request.config.stash[_rows].append(row)
        try:
            yield row
        except Hang:
            row.outcome = "hang"
            raise
        except BaseException:
            if not row.bad:
                row.outcome = "failed"
            raise

    return tried


@pytest.fixture(scope="module")
def a_scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Processes for all tests of a module, as its SCENE says; who is killed in one is there again in the next."""
    forkserver.ensure_running()
    before = Belongings.of_this_process()
    scene = Scene(tmp_path_factory.mktemp("scene"), **getattr(request.module, "SCENE", {}))
    yield scene
    scene.end()
    left = scene.watch.left_since(before)
    request.config.stash[_rows].append(Row("all of the above", request.module.__name__, "", _left(left)))
    assert left == []


@pytest.fixture
def scene(a_scene: Scene, request: pytest.FixtureRequest) -> Iterator[Scene]:
    a_scene.make_ready()
    failed = request.session.testsfailed
    yield a_scene
    if request.session.testsfailed != failed:
        a_scene.end()  # nobody knows what state it is in


def _left(left: list[str]) -> str:
    return "leak: " + ", ".join(left) if left else "nothing left behind"
