"""For unit tests."""

import pytest

from sglang_reshard.channel import Hub


@pytest.fixture
def hub():
    hub = Hub.open()
    yield hub
    hub.close()
