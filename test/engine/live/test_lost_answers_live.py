"""A live server behind a proxy that cuts connections: it serves what its trainer was told that it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmark.demo import tiny_model
from sglang_reshard.testing import cpu_host
from support.servers import launch, serving
from support.trainers import run_trainers

pytestmark = [pytest.mark.engine]
TP = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lost") / "model"
    tiny_model.save(folder, TP, TP)
    return folder


def run(model: Path, folder: Path, job: str, **arguments: Any) -> dict[str, Any]:
    with serving(launch(model, TP), cpu_host.environment(TP), model.parent / f"{job}.log") as url:
        ranks = run_trainers(2, f"lost_answers_job:{job}", folder, url=url, target_tp=TP, **arguments)
    assert ranks[0]["told"] == ranks[1]["told"]
    return ranks[0]


def test_a_server_serves_what_the_trainer_was_told_whenever_its_answer_is_lost(model: Path, tmp_path: Path) -> None:
    seen = run(model, tmp_path, "lose_answers", timeout_s=60, long=400)
    told, serves = seen["told"], seen["serves"]
    assert told["late"].startswith("EngineUnreachable")
    assert "no engine rank had begun to write: the old weights keep serving" in told["late"]
    assert serves["first"] == ["first"]
    assert serves["late"] == ["first"], "it was written when the requests that it waited for had ended"
    assert serves["after it"] == ["after it"]
    live = "after it"
    for version in ("staged", "at once", "last"):
        if "the old weights keep serving" not in told[version]:
            assert version == "last" or "the engine's answer was lost" in told[version]
            live = version
        assert serves[version] == [live], told[version]
    assert live == "last"
    assert seen["torn"] == ""


@pytest.mark.sweep
def test_a_server_that_is_stopped_past_the_deadline_is_not_left_torn(model: Path, tmp_path: Path) -> None:
    folder = model.parent
    with serving(launch(model, TP), cpu_host.environment(TP), folder / "stop.log") as url:
        pid = _process_that_listens(int(url.rpartition(":")[2]))
        job = "lost_answers_job:stop_the_server"
        seen, _ = run_trainers(2, job, tmp_path, url=url, target_tp=TP, timeout_s=4, pid=pid)
    assert "the old weights keep serving" in seen["told"][1]
    assert seen["waited_s"] < 40, "the server was still stopped"
    assert seen["health"] == 200
    assert seen["serves"] == [["first"], ["second", "third"]]


def _process_that_listens(port: int) -> int:
    import psutil

    (found,) = {c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port}
    return int(found)
