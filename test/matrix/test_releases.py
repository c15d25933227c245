"""Each SGLang release of the supported range: the hooks find their targets, and a server of it takes updates by URL."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.version import Version

from sglang_reshard.patches.sglang_versions import NEWEST, OLDEST
from sglang_reshard.selftest import tiny_model
from sglang_reshard.testing import cpu_host
from sglang_reshard.version import __version__
from support import environments
from support.servers import launch, serving
from support.sglangs import hooks_seen, importing
from support.trainers import run_trainers

pytestmark = [pytest.mark.releases, pytest.mark.engine]
TP, KEY = 2, "the admin's key"
RELEASES = [
    "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18",
    "0.5.19", "0.5.20", "0.5.21", "0.5.22",
]  # fmt: skip
SINCE = {  # the release from which a target exists
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.begin_weight_update": "0.5.21",
    "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change": "0.5.19",
}
UNTIL_0518 = "sglang.srt.managers.schedule_batch.Req.__init__"
# Targets of hooks whose parameters are not 0.5.12's in some release. The hooks of these take any.
OTHER_PARAMETERS = {
    "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.init_communicators",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._init_req_state",
    UNTIL_0518,
}


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the release, without its dependencies: on a host without a GPU those of 0.5.12 suffice."""
    folder = tmp_path_factory.mktemp(request.param.replace(".", "_")) / "packages"
    environments.unpack(f"sglang=={request.param}", folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def pinned() -> dict[str, Any]:
    return hooks_seen()


def test_the_range_has_no_other_release() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "sglang"], capture_output=True, text=True, timeout=120
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("Available versions: ")]
    if not lines:
        pytest.skip(f"pip reaches no package index here: {done.stderr.strip()[-300:]}")
    versions = lines[0].removeprefix("Available versions: ").split(", ")
    assert {v for v in versions if OLDEST < Version(v) < NEWEST} == set(RELEASES)


def test_the_hooks_find_their_targets(release: Path, pinned: dict[str, Any], record_property: Any) -> None:
    began = time.monotonic()
    with importing(release):
        seen = hooks_seen()
    assert seen["missing"] == []
    assert seen["told"] == __version__
    assert all(seen["methods"])
    assert seen["received"] == pinned["received"]
    parameters, version = {**seen["parameters"]}, Version(seen["version"])
    for target, since in SINCE.items():
        assert (parameters.pop(target, None) is not None) == (version >= Version(since))
    assert (UNTIL_0518 in parameters) == (version < Version("0.5.19"))
    assert {UNTIL_0518, *parameters} == set(pinned["parameters"])
    other = {target: names for target, names in parameters.items() if names != pinned["parameters"][target]}
    assert {target: names for target, names in other.items() if target not in OTHER_PARAMETERS} == {}
    says = f"{len(seen['hooks'])} hooks"
    if other:
        names = sorted(target.rpartition(".")[2] for target in other)
        says += f"; other parameters: {', '.join(names)}"
    record_property("matrix", environments.own_row("hooks", says, time.monotonic() - began, sglang=seen["version"]))


def test_a_server_takes_updates(release: Path, tmp_path: Path, record_property: Any) -> None:
    """The trainer has 0.5.12 installed. It needs no particular SGLang."""
    began = time.monotonic()
    tiny_model.save(tmp_path / "model", TP, TP)
    command = launch(tmp_path / "model", TP, "--admin-api-key", KEY)
    with importing(release):
        variables = cpu_host.environment(TP)
    with serving(command, variables, tmp_path / "log") as url:
        seen, _ = run_trainers(2, "server_job:update_a_server", tmp_path, url=url, key=KEY, target_tp=TP)
        told = httpx.get(f"{url}/server_info", headers={"Authorization": f"Bearer {KEY}"}, trust_env=False).json()
    assert seen["before"] != seen["expected"]
    assert seen["after"] == seen["after_pause"] == seen["expected"]
    assert seen["token_versions"] == ["while paused"]
    assert {state["reshard_version"] for state in told["internal_states"]} == {__version__}
    says = "by URL: an update, one while paused, tokens and their versions"
    row = environments.own_row("update by URL", says, time.monotonic() - began, sglang=told["version"])
    record_property("matrix", row)
