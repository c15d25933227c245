"""The forked wheel of the real stock one: what two installers make of it, and what SGLang's plugin loader finds."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, MetadataPathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

from sglang_reshard import __version__
from tools.release import fork, stock

pytestmark = [pytest.mark.engine]

NUMBER = 7
VERSION = f"0.5.12+reshard.{NUMBER}"
ABOUT = f"sglang-{VERSION}.dist-info"
INSTALLERS = {
    "pip": ["pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-compile"],
    "uv": ["uv", "pip", "install", "--quiet", "--no-deps", "--no-index", "--python", sys.executable],
}
# What a process that SGLang starts does, as far as the plugins.
LOAD = """
import collections, json, pathlib
from sglang_reshard.testing import cpu_host
cpu_host.activate(1)
import sglang, sglang.version, sglang_reshard
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
sglang_reshard.patches.install()
from sglang.srt.entrypoints.engine import Engine
hooks = collections.Counter(
    (target, kind.value, hook.__module__, getattr(hook, "__qualname__", ""))
    for target, all_of_it in HookRegistry._hooks.items() for kind, hook, _ in all_of_it
    if hook.__module__.startswith("sglang_reshard.")
)
print(json.dumps({
    "version": sglang.__version__,
    "tuple": sglang.version.__version_tuple__,
    "folders": [str(pathlib.Path(module.__file__).parent) for module in (sglang, sglang_reshard)],
    "method": Engine.update_weights_distributed.__module__,
    "hooks": len(hooks),
    "times": max(hooks.values()),
}))
"""


@pytest.fixture(scope="module")
def stock_wheel() -> Path:
    try:
        return stock.get(fork.CACHE)
    except stock.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def forked(stock_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fork.build(stock_wheel, NUMBER, tmp_path_factory.mktemp("forked"))


@pytest.fixture(scope="module", params=INSTALLERS)
def installed(forked: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not in this environment")
    folder = tmp_path_factory.mktemp(request.param)
    command = [sys.executable, "-m", *INSTALLERS[request.param], "--target", str(folder), str(forked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def distribution(folder: Path) -> Distribution:
    (found,) = MetadataPathFinder.find_distributions(MetadataPathFinder.Context(name="sglang", path=[str(folder)]))
    return found


def test_two_builds_are_the_same_bytes(stock_wheel: Path, forked: Path, tmp_path: Path) -> None:
    assert fork.build(stock_wheel, NUMBER, tmp_path).read_bytes() == forked.read_bytes()


def test_stocks_files_are_as_they_were_but_for_its_version(stock_wheel: Path, forked: Path) -> None:
    with zipfile.ZipFile(stock_wheel) as old, zipfile.ZipFile(forked) as new:
        theirs = {i.filename: old.read(i) for i in old.infolist() if not i.is_dir() and ".dist-info/" not in i.filename}
        made = {name: new.read(name) for name in new.namelist() if ".dist-info/" not in name}
    assert {name for name, data in theirs.items() if made[name] != data} == {"sglang/_version.py"}
    assert {name.split("/")[0] for name in made.keys() - theirs.keys()} == {"sglang_reshard"}


def test_what_an_installer_puts_down_is_what_record_says(installed: Path) -> None:
    files = [f for f in distribution(installed).files or [] if "bin" not in f.parts]  # scripts, which pip makes
    hashed = [file for file in files if file.hash is not None]
    assert len(hashed) > 2500
    for file in hashed:
        data = Path(str(file.locate())).read_bytes()
        assert file.hash is not None
        digest = base64.urlsafe_b64encode(hashlib.new(file.hash.mode, data).digest()).decode().rstrip("=")
        assert (digest, len(data)) == (file.hash.value, file.size), file
    listed = {str(file) for file in files}
    present = {p.relative_to(installed).as_posix() for p in installed.rglob("*") if p.is_file()}
    assert {name for name in present if name.startswith(("sglang/", "sglang_reshard/", "tools/", ABOUT))} <= listed


def test_metadata_is_valid_and_asks_for_both(installed: Path, stock_wheel: Path) -> None:
    found = distribution(installed)
    described = Metadata.from_email((installed / ABOUT / "METADATA").read_bytes(), validate=True)
    assert (described.name, str(described.version)) == ("sglang", VERSION)
    needs = {str(need) for need in described.requires_dist or []}
    with zipfile.ZipFile(stock_wheel) as old:
        theirs = Metadata.from_email(old.read("sglang-0.5.12.dist-info/METADATA"), validate=True).requires_dist or []
    assert needs >= {str(need) for need in theirs}
    assert needs >= {str(Requirement(need)) for need in ("torch>=2.10", "msgspec>=0.19", "rich>=13", "kernels<0.15")}
    assert all(need.marker and not need.specifier for need in map(Requirement, needs) if need.name == "sglang")
    assert sorted(described.license_files or []) == ["LICENSE", "sglang_reshard/LICENSE"]
    assert all((installed / ABOUT / "licenses" / name).is_file() for name in described.license_files or [])
    names = {(entry.group, entry.name) for entry in found.entry_points}
    plugin = ("sglang.srt.plugins", "reshard")
    assert names == {plugin, *(("console_scripts", n) for n in ("sglang", "killall_sglang", "sglang-reshard"))}


@pytest.mark.parametrize("installed", ["pip"], indirect=True)
def test_sglangs_own_loader_finds_the_plugin_and_loads_it_once(installed: Path, tmp_path: Path) -> None:
    """Also beside the plugin's own distribution, which the environment of these tests may have: one name, one load."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert seen["folders"] == [str(installed / "sglang"), str(installed / "sglang_reshard")]
    assert (seen["version"], seen["tuple"]) == (VERSION, [0, 5, 12, f"reshard.{NUMBER}"])
    assert seen["method"] == "sglang_reshard.patches.engine"
    assert seen["hooks"] > 5
    assert seen["times"] == 1
    said = [line for line in done.stderr.splitlines() if "Failed to" in line]
    assert not said
    assert __version__ in (installed / "sglang" / "_version.py").read_text().splitlines()[0]
