"""Unit tests of the package under the lowest and the newest torch, with the wheel and what they import themselves.

Tests of documents, benchmarks and releases are about the checkout, and run in its own environment only.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from support import environments

pytestmark = pytest.mark.matrix
ENVIRONMENTS = {
    "3.10, lowest": ("3.10", environments.TESTS, True),
    "3.13, newest": ("3.13", environments.TESTS, False),
}
_OF_THE_CHECKOUT = re.compile(r"^\s*(from|import) (benchmark|sgl_kernel|sglang|tools)\b", re.MULTILINE)
_PAGES = re.compile(r"test_(documents|pages|released_pages|server_args_page|summary|verl|doctor)")
_DEADLINE_S = 3600.0


def of_the_package() -> list[str]:
    files = sorted((environments.ROOT / "test" / "unit").glob("test_*.py"))
    return [str(f) for f in files if not (_OF_THE_CHECKOUT.search(f.read_text()) or _PAGES.match(f.name))]


@pytest.mark.timeout(2 * _DEADLINE_S)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_unit_tests_pass(name: str, wheel: Path, record_property: Any) -> None:
    python, requirements, lowest = ENVIRONMENTS[name]
    folder = f"units-{name.replace(', ', '-')}"
    environment = environments.install(folder, python, wheel, requirements, lowest)
    began = time.monotonic()
    counts = environment.run_tests(of_the_package(), environment.variables(), _DEADLINE_S)
    record_property("matrix", environment.row("unit tests", counts, time.monotonic() - began))
