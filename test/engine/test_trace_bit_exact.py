"""A traced program leaves the same bytes in an engine rank as SGLang's own loader, at the same addresses.

Real SGLang models, every rank of several engines, live memory full of garbage beforehand.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trace_cases import ANSWER, CPU_CASES, GPU_CASES, MODELS_WITH_EXPERTS, Case

pytestmark = pytest.mark.engine


def examined(kind, folder):
    """What trace_cases.py found, by case."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("trace_cases.py")), kind, str(folder)],
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-8000:]
    lines = [x.removeprefix(ANSWER) for x in run.stdout.splitlines() if x.startswith(ANSWER)]
    return {Case(*case): found for case, found in map(json.loads, lines)}


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    return examined("gpu", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    return examined("cpu", tmp_path_factory.mktemp("models"))


def assert_exact(found):
    assert found["written_by_the_trace"] == []
    assert found["differing"] == []
    assert found["same_addresses"]
    assert found["tensors"] > 20
    # The comparison would have noticed one copy less, and only where that copy lands.
    assert found["left_out"] in found["differing_without_one_copy"]


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_gpu_code_paths(gpu, case):
    assert_exact(gpu[case])


@pytest.mark.parametrize("case", CPU_CASES, ids=str)
def test_cpu_code_paths(cpu, case):
    assert_exact(cpu[case])


def test_programs_are_copies_alone_but_for_padding_and_mla(gpu):
    for case, found in gpu.items():
        assert found["scratch_bytes"] == 0
        expected = {"fill 0"} | ({"post_load_weights"} if case.model == "deepseek_v3" else set())
        assert set(found["steps"]) <= expected, case


def test_expert_parallel_ranks_read_their_own_experts_whole(gpu):
    """With two expert ranks of two each, a rank reads half of the experts, and a half of each of those."""
    for model in MODELS_WITH_EXPERTS:
        assert gpu[Case(model, 4, 0, ep_size=2)]["copies"] < gpu[Case(model, 4, 0)]["copies"]
