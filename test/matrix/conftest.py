"""What the tests of the matrix share: the wheel of the day."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.release import plain


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain.build(tmp_path_factory.mktemp("wheel"))
