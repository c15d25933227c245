"""Tests with engines start processes that have imported SGLang already; see support/zygote.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import zygote


@pytest.fixture(scope="module")
def forks() -> Iterator[None]:
    with zygote.forks("cpu"):
        yield
