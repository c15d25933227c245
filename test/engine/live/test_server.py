"""A stock `sglang.launch_server` with the package installed: updated by a trainer that knows its URL only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sglang_reshard import __version__
from sglang_reshard.selftest import tiny_model
from sglang_reshard.selftest.children import free_port
from sglang_reshard.testing import cpu_host
from support.reports import of_others
from support.servers import launch, serving
from support.trainers import run_trainers

pytestmark = [pytest.mark.engine]
TP, KEY = 2, "the admin's key"
SPANNING = 150  # server_job's
OPTIONS = ("--admin-api-key", KEY, "--chat-template", "chatml")  # the tokenizer has no template of its own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    tiny_model.save(folder / "model", TP, TP)
    return folder / "model"


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    """The URL of a TP=2 server on dummy weights, which asks for an admin key."""
    with serving(launch(model, TP, *OPTIONS), cpu_host.environment(TP), model.parent / "log") as url:
        yield url


def test_a_trainer_updates_a_server_by_url(server: str, tmp_path: Path) -> None:
    ranks = run_trainers(2, "server_job:update_a_server", tmp_path, url=server, key=KEY, target_tp=TP)
    seen = ranks[0]
    before = seen["before"]
    assert before["missing"].startswith("the engine started on dummy weights, and no update has brought others yet")
    assert before["tokens"] == ["WeightsMissing", before["missing"]]
    assert before["health"][0] == 503
    assert before["missing"] in before["health"][1]
    assert seen["after"] == seen["expected"]
    assert ranks[1]["report"] == of_others(seen["report"])
    assert seen["paused"]["success"]
    assert seen["after_pause"] == seen["expected"]
    info = httpx.get(f"{server}/server_info", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert info["weight_version"] == "while paused"
    assert {state["reshard_version"] for state in info["internal_states"]} == {__version__}


def test_a_server_follows_what_was_written_as_no_engine_could_be_reached(server: str, tmp_path: Path) -> None:
    seen, _ = run_trainers(2, "server_job:write_for_a_follower", tmp_path, url=server, key=KEY, target_tp=TP)
    assert seen["fallen back"] == [[False, "disk"]] * 4
    read = [re.search(r": (?:1|4), [\d,]+ bytes loaded, ([\d,]+) of the folder", said) for said in seen["said"][:2]]
    assert all(read), seen["said"]
    whole, deltas = (int(found[1].replace(",", "")) for found in read if found is not None)
    assert 0 < deltas < whole / 8, "three versions behind"
    assert seen["tokens"] == seen["expected"]
    assert "which is not older than snapshot '4'" in seen["said"][2], "the trainer has updated it directly since"
    assert seen["versions"] == ["1", "4", "5", "4"], "it goes back where that is asked for"


def test_a_server_passes_over_what_is_no_snapshot_of_its_model(server: str, tmp_path: Path) -> None:
    (seen,) = run_trainers(1, "server_job:follow_what_is_bad", tmp_path, url=server, key=KEY, target_tp=TP)
    assert_followed(seen)


def assert_followed(seen: dict[str, Any]) -> None:
    """See `server_job.follow_what_is_bad`."""
    good = seen["updated"]
    assert good["digest"] == seen["update"] != ""
    assert seen["followed"] == good | {"version": "good", "transport": "disk"}, "digest and tokens are an update's"
    assert seen["bytes"] < seen["read"] < 2 * seen["bytes"], "each rank reads its part, and what all have"
    told = {"shape": "norm", "unknown": "layers.99", "partial": "embed_tokens"}
    for name, tensor in told.items():
        refused, state = seen[name]
        assert tensor in refused
        assert state == seen["followed"]
    assert seen["polls"][:4] == ["good", None, None, None]
    assert seen["polls"][5] == "after"
    assert seen["last"]["version"] == (seen["polls"][4] or "good"), "all of it, or nothing"
    assert (seen["last"]["tokens"] == good["tokens"]) == (seen["polls"][4] is None)
    assert seen["after"] == seen["followed"] | {"version": "after"}
    assert seen["stock"] == {"tokens": good["tokens"], "version": "SGLang's own", "digest": "", "transport": ""}


def test_no_client_names_the_cache_of_another_version(server: str, tmp_path: Path) -> None:
    (seen,) = run_trainers(1, "server_job:keys_like_marks", tmp_path, url=server, key=KEY, target_tp=TP)
    assert set(seen["cold"]) == {0}
    assert min(seen["warm"]) > 0, "each finds its own"


def test_answers_have_the_versions_of_their_tokens(server: str, tmp_path: Path) -> None:
    (seen,) = run_trainers(1, "server_job:answers_of_two_versions", tmp_path, url=server, key=KEY, target_tp=TP)
    assert len(seen) == 3
    for path, (last, spans) in seen.items():
        assert [(span["version"], span["start"], span["end"]) for span in spans] == [
            ("first", 0, spans[0]["end"]),
            ("second", spans[0]["end"], SPANNING),
        ], path
        assert last == "second"


def test_parameters_that_a_trainer_broadcasts_are_taken_version_by_version(server: str, tmp_path: Path) -> None:
    job = "server_job:stream_parameters"
    _, seen = run_trainers(2, job, tmp_path, url=server, key=KEY, target_tp=TP, port=free_port())
    assert [report["weight_version"] for report in seen["reports"]] == ["first", "second"]
    assert ["plan" in report["seconds"] for report in seen["reports"]] == [True, False]
    assert seen["version"] == "second"
    assert seen["tokens"] == seen["expected"]


def test_a_script_does_the_same_with_a_server_and_with_an_engine_of_its_own(
    server: str, model: Path, tmp_path: Path
) -> None:
    job = "server_job:one_script_two_engines"
    ranks = run_trainers(2, job, tmp_path, url=server, key=KEY, target_tp=TP, model=str(model))
    seen, of_server, of_engine = ranks[0], ranks[0]["server"], ranks[0]["engine"]
    assert all(rank == seen for rank in ranks)
    for same in ("digest", "tokens", "same version", "paused", "tokens again"):
        assert of_server[same] == of_engine[same], same
    assert len(of_server["digest"]) == 16
    assert of_server["paused"][0] == "Mismatch"
    for of in (of_server, of_engine):
        assert of["offloaded"][0] == "EngineRefused"
        assert "resume_memory_occupation" in of["offloaded"][1]
    assert of_server["no prompt"] == ["EngineRefused"]
    assert of_engine["no prompt"] == ["ReshardError"]
    assert seen["wrong key"][0] == "Unauthorized"
    assert "--admin-api-key" in seen["wrong key"][1]
    for of, engine_ranks in ((of_server, TP), (of_engine, 1)):
        info = of["info"]
        assert (info["version"], info["digest"], info["verified"]) == ("first", of_server["digest"], "full")
        assert (info["engine_ranks"], info["layout"]["trainer_ranks"]) == (engine_ranks, 2)
        assert of["released"]["digest"] == ""
    assert of_server["info"]["layout"] == of_engine["info"]["layout"]
    assert httpx.get(f"{server}/health").status_code == 200, "it goes on after the session"


def test_old_weights_serve_while_new_ones_are_staged(server: str, tmp_path: Path) -> None:
    seen = run_trainers(2, "server_job:stage", tmp_path, url=server, key=KEY, target_tp=TP)[0]
    plain, staged = seen["plain"], seen["staged"]
    assert plain["meanwhile"] == []
    assert len(staged["meanwhile"]) > 5
    assert set(staged["meanwhile"]) == {"plain"}, "the version before"
    assert staged["afterwards"][-1] == "staged"
    assert staged["report"]["verified"] == "full"
    assert all(rank["staged_bytes"] > 0 for rank in staged["report"]["engine_ranks"])


def test_a_stranger_is_turned_away(server: str) -> None:
    assert httpx.post(f"{server}/update_weights_distributed", content=b"{}").status_code == 401
    assert httpx.get(f"{server}/weights_info").status_code == 401


def test_a_malformed_request_is_answered_not_served(server: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    for body in (b"", b"{}", b'{"session": 3}', b"\x80\x04pickle"):
        answer = httpx.post(f"{server}/update_weights_distributed", content=body, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["success"] is False
        assert "malformed request" in answer.json()["message"]
    assert httpx.get(f"{server}/health").status_code == 200


def test_a_server_serves_what_the_trainer_was_told_whenever_its_answer_is_lost(server: str, tmp_path: Path) -> None:
    """Behind a proxy that cuts connections."""
    job = {"url": server, "key": KEY, "target_tp": TP, "timeout_s": 60, "long": 200}
    seen, other = run_trainers(2, "lost_answers_job:lose_answers", tmp_path, **job)
    told, serves = seen["told"], seen["serves"]
    assert told == other["told"]
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
def test_a_server_that_is_stopped_past_the_deadline_is_not_left_torn(server: str, tmp_path: Path) -> None:
    (pid,) = {
        c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and server.endswith(f":{c.laddr.port}")
    }
    job = {"url": server, "key": KEY, "target_tp": TP, "timeout_s": 4, "pid": pid}
    seen, _ = run_trainers(2, "lost_answers_job:stop_the_server", tmp_path, **job)
    assert "the old weights keep serving" in seen["told"][1]
    assert seen["waited_s"] < 40, "the server was still stopped"
    assert seen["health"] == 200
    assert seen["serves"] == [["first"], ["second", "third"]]
