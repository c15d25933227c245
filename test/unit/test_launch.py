"""Starting an engine from a script: what would look like a hang is an error."""

import os
import subprocess
import sys
import textwrap
from types import ModuleType

import pytest

from sglang_reshard.errors import Unsupported
from sglang_reshard.patches.embedded_engine import EmbeddedEngine
from sglang_reshard.patches.launch import TORCHRUN_VARIABLES, without_torchrun_variables

GUARDED = """
    from sglang_reshard.patches.launch import require_main_guard

    def main():
        require_main_guard()
        print("started")

    {start}
"""


def run_script(folder, start):
    script = folder / "script.py"
    script.write_text(textwrap.dedent(GUARDED).format(start=start))
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("start", "guarded"),
    [
        ('if __name__ == "__main__":\n    main()', True),
        ("if '__main__' == __name__: main()", True),
        ("if True:\n    main()", False),
        ("result = [main() for _ in range(1)]", False),
    ],
)
def test_a_guarded_script_starts_and_another_is_told_so_with_its_line(tmp_path, start, guarded):
    done = run_script(tmp_path, start)
    assert (done.returncode == 0, done.stdout == "started\n") == (guarded, guarded)
    assert guarded or ("script.py, line" in done.stderr and 'if __name__ == "__main__":' in done.stderr)


def test_a_command_has_nothing_to_guard():
    code = "from sglang_reshard.patches.launch import require_main_guard; require_main_guard(); print('started')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "started\n"


def test_a_child_that_imports_the_script_stops_at_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, os
            from sglang_reshard.patches.launch import require_main_guard

            if os.environ.get("IN_CHILD"):
                require_main_guard()

            if __name__ == "__main__":
                os.environ["IN_CHILD"] = "1"
                child = multiprocessing.get_context("spawn").Process(target=print)
                child.start()
                child.join()
                print("child ended with", child.exitcode)
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert "child ended with 1" in done.stdout
    assert "import the script again" in done.stderr


def test_torchruns_variables_are_away_inside_and_back_afterwards(monkeypatch):
    for name in TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "x")
    with without_torchrun_variables():
        assert not any(name in os.environ for name in TORCHRUN_VARIABLES)
    assert all(os.environ[name] == "x" for name in TORCHRUN_VARIABLES)


SET = {"NCCL_CUMEM_ENABLE": "0", "SGLANG_RUN_ID": "sglang-run-1", "PROMETHEUS_MULTIPROC_DIR": "/tmp/metrics"}


class EngineLikeSglangs:
    """Sets what SGLang's does in the process that starts it; `seen` is what its children would inherit."""

    def __init__(self, *, fails: bool = False) -> None:
        os.environ.update(SET, CUDA_DEVICE_MAX_CONNECTIONS="8")
        os.environ.pop("NCCL_ALGO")
        self.seen = dict(os.environ)
        if fails:
            raise RuntimeError("out of memory")


@pytest.fixture
def stand_in_sglang(monkeypatch):
    module = ModuleType("sglang.srt.entrypoints.engine")
    module.Engine = EngineLikeSglangs
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.engine", module)
    monkeypatch.setattr("sglang_reshard.patches.embedded_engine_guard.watch_processes", lambda engine: None)
    for name, value in {"RANK": "0", "NCCL_ALGO": "ring", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in (
        "NCCL_CUMEM_ENABLE",
        "SGLANG_RUN_ID",
        "PROMETHEUS_MULTIPROC_DIR",
        "SGLANG_BLOCK_NONZERO_RANK_CHILDREN",
    ):
        monkeypatch.delenv(name, raising=False)


def test_an_embedded_engine_leaves_the_environment_as_it_was(stand_in_sglang):
    """Point 9 of the rules of GPUs: a later communicator's members must agree on NCCL's settings."""
    before = dict(os.environ)
    seen = EmbeddedEngine.start({}).engine.seen
    assert seen["NCCL_CUMEM_ENABLE"] == "0", "its processes have what SGLang set"
    assert seen["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] == "0"
    assert "RANK" not in seen
    # prometheus_client reads this one at every new metric: without it SGLang's calls would fail.
    assert os.environ.pop("PROMETHEUS_MULTIPROC_DIR") == "/tmp/metrics"
    assert dict(os.environ) == before


def test_an_engine_on_a_host_without_a_gpu_says_where_to_read(monkeypatch):
    def missing(name):
        raise ImportError("libcuda.so.1: cannot open shared object file: No such file or directory")

    module = ModuleType("sglang.srt.entrypoints.engine")
    module.__getattr__ = missing
    for name in ("sglang", "sglang.srt", "sglang.srt.entrypoints", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(Unsupported, match=r"cpu-host\.md"):
        EmbeddedEngine.start({})


def test_an_engine_that_does_not_start_leaves_the_environment_as_it_was(stand_in_sglang):
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="out of memory"):
        EmbeddedEngine.start({"fails": True})
    del os.environ["PROMETHEUS_MULTIPROC_DIR"]
    assert dict(os.environ) == before
