"""For unit tests."""

import pytest

from sglang_reshard.control import ControlServer


@pytest.fixture
def control_server():
    server = ControlServer.open()
    yield server
    server.close()
