"""For unit tests."""

import pytest

from sglang_reshard.control import ControlServer


@pytest.fixture
def hub():
    hub = ControlServer.open()
    yield hub
    hub.close()
