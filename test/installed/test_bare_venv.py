"""The wheel with the packages that it declares, and nothing else, is a whole trainer's side."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from support import bare_venv
from tools.release import plain

# Of each package that an extra brings, or that comes with a GPU build of torch: what imports it at once.
OF_EXTRAS = {
    "sglang": ("patches.",),
    "verl": ("testing.cpu_host.verl_platform", "verl"),
    "triton": ("copying.copy_kernel",),
    "transformers": ("selftest.",),
}
IMPORT_ALL = """\
import importlib, json, pkgutil
import sglang_reshard
lacking = {}
for module in pkgutil.walk_packages(sglang_reshard.__path__, "sglang_reshard.", onerror=lambda name: None):
    if module.name.endswith("__main__") or ".stand_in" in module.name:
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        lacking.setdefault(error.name.split(".")[0], []).append(module.name)
print(json.dumps([lacking, sglang_reshard.__file__]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    wheel = plain.build(folder)
    try:
        return bare_venv.make(folder / "venv", wheel)
    except bare_venv.NoIndex as error:
        pytest.skip(f"uv gets no packages here: {error}")


def run(python: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    return subprocess.run(
        [python, *arguments], env=environment, cwd=python.parent, capture_output=True, text=True, timeout=300
    )


def test_every_module_is_imported_without_what_only_extras_bring(python: Path) -> None:
    done = run(python, "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    lacking, home = json.loads(done.stdout)
    assert Path(home).is_relative_to(python.parent.parent), "the wheel's own package, and not the checkout's"
    assert lacking.keys() <= OF_EXTRAS.keys(), lacking
    for package, modules in lacking.items():
        others = [m for m in modules if not m.removeprefix("sglang_reshard.").startswith(OF_EXTRAS[package])]
        assert others == [], f"{package} is imported by more than an extra explains"


def test_the_doctor_finds_nothing_missing_on_a_trainer_s_side(python: Path) -> None:
    done = run(python, "-m", "sglang_reshard", "doctor", "--side", "trainer", "--json")
    told = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert told["imports of a trainer"]["status"] == "ok", told["imports of a trainer"]
    assert told["plugin"]["status"] == "ok"


def test_the_doctor_fails_an_engine_s_side_with_the_cure(python: Path) -> None:
    done = run(python, "-m", "sglang_reshard", "doctor", "--side", "engine", "--json")
    assert done.returncode == 1
    told = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    found = told["imports of an engine"]
    assert found["status"] == "fail"
    assert "sglang" in found["says"]
    assert "pip install 'sglang-reshard[engine]'" in found["cure"]


@pytest.mark.parametrize("module", ["msgspec", "numpy", "rich"])
def test_the_doctor_names_a_dependency_that_is_gone(python: Path, module: str, tmp_path: Path) -> None:
    """Hidden by a module that is found first, as the environment is shared by these tests."""
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('No module named {module}', name={module!r})")
    done = run(python, "-m", "sglang_reshard.cli.doctor", "--side", "trainer", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert f" needs {module}, which is not installed" in done.stdout
    assert f"-> pip install {module}\n" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(" ok"), "the other checks go on"
