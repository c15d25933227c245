"""A server of the newest SGLang that the patches work with, updated by trainers of an environment with the oldest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sglang_reshard import __version__
from sglang_reshard.patches.sglang_versions import NEWEST
from sglang_reshard.selftest import tiny_model
from sglang_reshard.testing import cpu_host
from support.servers import launch, serving
from support.sglangs import chosen
from support.trainers import run_trainers
from test_server import assert_followed

pytestmark = [pytest.mark.engine]
TP, KEY = 2, "the admin's key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a TP=2 server on dummy weights, with metrics, which asks for an admin key."""
    folder = tmp_path_factory.mktemp("newest_server")
    tiny_model.save(folder / "model", TP, TP)
    command = launch(folder / "model", TP, "--admin-api-key", KEY, "--enable-metrics")
    with chosen("newest"), serving(command, cpu_host.environment(TP), folder / "log") as url:
        yield url


def test_it_takes_updates_by_url_and_says_so_everywhere(server: str, tmp_path: Path) -> None:
    seen = run_trainers(2, "server_job:update_a_server", tmp_path, url=server, key=KEY, target_tp=TP)[0]
    assert seen["before"] != seen["expected"]
    assert seen["after"] == seen["expected"]
    assert seen["paused"]["success"]
    assert seen["after_pause"] == seen["expected"]
    with httpx.Client(base_url=server, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False) as client:
        told = client.get("/server_info").json()
        assert told["version"] == str(NEWEST)
        assert client.get("/model_info").json()["weight_version"] == "while paused"
        assert {state["reshard_version"] for state in told["internal_states"]} == {__version__}
        info = client.get("/weights_info").json()
        assert (info["version"], info["engine_ranks"], info["torn"]) == ("while paused", TP, "")
        metrics = client.get("/metrics").text
    assert "sglang_reshard_updates_total 2.0" in metrics
    assert 'sglang_reshard_weights_info{version="while paused"} 1.0' in metrics
    assert "sglang_reshard_torn 0.0" in metrics


def test_it_follows_a_folder(server: str, tmp_path: Path) -> None:
    (seen,) = run_trainers(1, "server_job:follow_what_is_bad", tmp_path, url=server, key=KEY, target_tp=TP)
    assert_followed(seen)
