"""Engine tests start processes that have imported SGLang already; see support/zygote.py."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_reshard.testing import cpu_host
from support import zygote
from support.scenarios import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = pyfuncitem._fixtureinfo.argnames
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in arguments}))
    return True


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    with zygote.forks("cpu"):
        yield


@pytest.fixture(scope="module")
def engine_class() -> Any:
    """The class of engines whose HTTP process is real and whose schedulers are not, see `support.asgi_engine`."""
    cpu_host.activate(tp_size=1)  # else SGLang, which this imports, is no CPU's for the tests that follow
    from support.asgi_engine import Engine

    return Engine
