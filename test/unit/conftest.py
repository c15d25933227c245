"""For unit tests."""

import pytest

from sglang_reshard.control import ControlServer
from support.gpu_runtime import one_process_runtime


@pytest.fixture
def control_server():
    server = ControlServer.open()
    yield server
    server.close()


@pytest.fixture
def gpu():
    with one_process_runtime() as runtime:
        yield runtime
