"""Servers with data parallel ranks and with pipeline stages, updated by URL while clients generate."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_reshard.selftest import tiny_model
from sglang_reshard.testing import cpu_host
from support.servers import launch, serving
from support.sweep import sweep
from support.trainers import run_trainers

pytestmark = [pytest.mark.engine]
KEY = "the admin's key"


@pytest.mark.parametrize("option", [sweep("--dp-size"), "--pp-size"])
def test_each_answer_is_of_one_version_on_all_ranks(option: str, tmp_path: Path) -> None:
    tiny_model.save(tmp_path / "model", 2, 1)
    command = launch(tmp_path / "model", 1, option, "2", "--admin-api-key", KEY)
    with serving(command, cpu_host.environment(1, 2), tmp_path / "server.log") as url:
        job = {"url": url, "key": KEY, "staged": option == "--pp-size"}
        seen = run_trainers(2, "server_job:under_load", tmp_path, **job)[0]
    assert [rank["rank"] for rank in seen["reports"][0]["engine_ranks"]] == [0, 1]
    for version, said in seen["said"].items():
        of_it = [tokens for v, tokens in seen["answers"] if v == version and len(tokens) == len(said)]
        assert of_it
        assert all(tokens == said for tokens in of_it), version
    assert len({tuple(said) for said in seen["said"].values()}) > 1
    assert seen["loaded"] == [["snapshot", seen["said"]["3"]], ["SGLang's own", seen["said"]["3"]]]
    if option == "--pp-size":
        assert seen["staged"][0] == "EngineRefused"
        assert "staged=True with pp_size=2" in seen["staged"][1]
