"""For all tests."""

import logging

import pytest
from hypothesis import settings

# How long one example takes says nothing here: machines are shared, and the first one imports torch.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture
def told(caplog, monkeypatch):
    """What this package logs from warnings on, whatever libraries that ran before have made of the root logger."""
    own = logging.getLogger("sglang_reshard")
    monkeypatch.setattr(own, "propagate", False)
    monkeypatch.setattr(own, "handlers", [caplog.handler])
    caplog.set_level(logging.WARNING, own.name)
    return caplog
