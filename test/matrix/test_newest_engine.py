"""Engine tests under the newest SGLang, in an environment with the torch and the transformers that it requires."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support import environments
from support.environments import ROOT
from support.scripts import run_script

pytestmark = [pytest.mark.matrix, pytest.mark.engine]
TESTS = {
    "live engines": ("test/engine/live/test_server_args_live.py", "test/engine/live/test_stock_paths.py"),
    "pipelines and moved experts": (
        "test/engine/test_pipeline.py",
        "test/engine/architectures/test_moved_experts.py",
        "test/engine/architectures/test_started_on_dummy.py",
    ),
}
VERL_FOLDER = "SGLANG_RESHARD_TEST_VERL"  # see examination.py; only the environment of these tests has verl
CASES = ROOT / "test" / "engine" / "architectures" / "architecture_cases.py"
_DEADLINE_S = 3600.0


@pytest.mark.timeout(2 * _DEADLINE_S)
@pytest.mark.parametrize("name", TESTS)
def test_the_engine_s_tests_pass(name: str, wheel: Path, record_property: Any) -> None:
    own, began = environments.newest_sglang(wheel), time.monotonic()
    counts = own.run_tests(TESTS[name], own.engine_variables(1), _DEADLINE_S)
    record_property("matrix", own.row(f"tests of {name}", counts, time.monotonic() - began))


@pytest.mark.timeout(2 * _DEADLINE_S)
def test_no_architecture_fails(wheel: Path, tmp_path: Path, record_property: Any) -> None:
    """Some engine ranks of every architecture of this registry, of which `make test` tries one of each kind."""
    own, began = environments.newest_sglang(wheel), time.monotonic()
    path = os.pathsep.join(map(str, (ROOT / "test", ROOT, own.stand_in())))
    verl = Path(str(importlib.util.find_spec("verl").origin)).parent  # type: ignore[union-attr]
    outcomes: Counter[str] = Counter()
    failed = []
    for code_paths in ("gpu", "cpu"):
        lines = run_script(
            CASES, code_paths, "fast", str(tmp_path / code_paths), timeout_s=_DEADLINE_S, python=own.python,
            environment={"PYTHONPATH": path, VERL_FOLDER: str(verl)},
        )  # fmt: skip
        for line in lines:
            if line.startswith("case: "):
                case, finding = json.loads(line.removeprefix("case: "))
                outcomes[finding["outcome"]] += 1
                if finding["outcome"] == "failed":
                    failed.append((*case, finding["why"]))
    assert failed == []
    assert outcomes["passed"] > 100
    says = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    record_property("matrix", own.row("engine ranks of architectures", says, time.monotonic() - began))
