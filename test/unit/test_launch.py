"""Starting an engine from a script: what would look like a hang is an error."""

import os
import subprocess
import sys
import textwrap

import pytest

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
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("start", ['if __name__ == "__main__":\n    main()', "if '__main__' == __name__: main()"])
def test_a_guarded_script_starts(tmp_path, start):
    assert run_script(tmp_path, start).stdout == "started\n"


@pytest.mark.parametrize("start", ["main()", "if True:\n    main()", "result = [main() for _ in range(1)]"])
def test_an_unguarded_script_is_told_so_with_its_line(tmp_path, start):
    done = run_script(tmp_path, start)
    assert done.returncode != 0
    assert "script.py, line" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr


def test_a_command_has_nothing_to_guard():
    code = "from sglang_reshard.patches.launch import require_main_guard; require_main_guard(); print('started')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
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
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert "child ended with 1" in done.stdout
    assert "import the script again" in done.stderr


def test_torchruns_variables_are_away_inside_and_back_afterwards(monkeypatch):
    for name in TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "x")
    with without_torchrun_variables():
        assert not any(name in os.environ for name in TORCHRUN_VARIABLES)
    assert all(os.environ[name] == "x" for name in TORCHRUN_VARIABLES)
