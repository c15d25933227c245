"""Engine tests under the newest SGLang, in an environment with the torch and the transformers that it requires."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_reshard.testing import cpu_host
from support import environments

pytestmark = [pytest.mark.matrix, pytest.mark.engine]
ROOT = Path(__file__).parents[2]
TESTS = {
    "architectures": ("test/engine/architectures/test_architectures.py",),
    "live engines": (
        "test/engine/live/test_reshard.py",
        "test/engine/live/test_fresh_engines.py",
        "test/engine/live/test_torn.py",
        "test/engine/live/test_mistakes.py",
    ),
    "pipelines and moved experts": (
        "test/engine/test_pipeline.py",
        "test/engine/architectures/test_moved_experts.py",
        "test/engine/architectures/test_started_on_dummy.py",
    ),
}
_DEADLINE_S = 3600.0


@pytest.mark.timeout(2 * _DEADLINE_S)
@pytest.mark.parametrize("name", TESTS)
def test_the_engine_s_tests_pass(name: str, wheel: Path, record_property: Any) -> None:
    own, began = environments.newest_sglang(wheel), time.monotonic()
    command = [own.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS[name]]
    variables = own.variables(**{**cpu_host.environment(1), "PYTHONPATH": str(own.stand_in())})
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=_DEADLINE_S)
    assert done.returncode == 0, done.stdout[-8000:]
    counts = re.findall(r"\d+ (?:passed|skipped)", done.stdout.splitlines()[-1])
    record_property("matrix", own.row(f"tests of {name}", ", ".join(counts), time.monotonic() - began))
