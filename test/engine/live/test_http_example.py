"""The examples of trainers and a server that meet by URL and key, by the commands that their pages print."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from sglang_reshard.api.remote_engine import API_KEY, RemoteEngine
from sglang_reshard.errors import Unauthorized
from support import zygote
from support.documents import ROOT, blocks, printed
from support.servers import serving

pytestmark = [pytest.mark.engine]
LEARNED = [13, 21, 34, 55, 89, 144]
PAGE, RECIPES, KEY = "examples/http/README.md", "docs/recipes/trainers.md", "secret"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("example")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """By `sglang serve`, with the one key that guards everything; started the ordinary way."""
    command = shlex.split(printed(PAGE, "serve_on_cpu.py").replace("$KEY", KEY).replace("/tmp/served", str(folder)))
    command[1] = str(ROOT / command[1])
    with serving([*command, "--skip-server-warmup"], zygote.ORDINARY, folder / "log") as url:
        yield url


def ran(document: str, script: str, server: str, folder: Path, **variables: str) -> list[str]:
    """Runs the document's command in a shell, for this server. Returns what it prints."""
    line = printed(document, script).replace("/tmp/served", str(folder)).replace("update.py", f"{folder}/update.py")
    line = line.replace("127.0.0.1:30000", server.removeprefix("http://"))
    ran = subprocess.run(
        ["bash", "-c", line],
        cwd=ROOT,
        env={**os.environ, "KEY": KEY, "OMP_NUM_THREADS": "1", "PET_STANDALONE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    return ran.stdout.splitlines()


def answers(lines: list[str]) -> dict[str, list[int]]:
    """Version -> tokens that the engine said, as trainers print them."""
    told = [line for line in lines if " says " in line]
    return {line.partition(":")[0]: json.loads(line.partition(" says ")[2]) for line in told}


@pytest.fixture(scope="module")
def said(server: str, folder: Path) -> list[str]:
    """By the trainer, whose server had its first weights from nobody."""
    assert RemoteEngine(server, api_key=KEY).weights_info().layout is None
    return ran(PAGE, "train.py", server, folder)


def test_every_step_is_served(said: list[str]) -> None:
    steps, answers = said[0::2], said[1::2]
    assert [line.partition(":")[0] for line in steps] == ["step 1", "step 2", "step 3"]
    assert [line.strip()[:11] for line in answers] == ["step 1 says", "step 2 says", "step 3 says"]
    before, after = (json.loads(answers[step].partition("says")[2]) for step in (0, 2))
    assert before != after == LEARNED, "it is what it was taught"


def test_the_server_tells_which_weights_it_has(server: str, said: list[str]) -> None:
    info = RemoteEngine(server, api_key=KEY).check()
    assert (info.version, info.verified, info.torn, info.under_way) == ("step 3", "full", "", False)
    assert info.digest
    assert f"digest {info.digest}," in said[4]
    assert (info.update, info.engine_ranks, info.transport) == (3, 1, "ipc")
    assert info.layout is not None
    assert info.layout.trainer_ranks == 2
    assert info.layout.nbytes > 40e6


def test_the_key_itself_is_not_told(server: str, said: list[str], folder: Path) -> None:
    (told,) = ran(PAGE, "/weights_info", server, folder)
    assert "session" in told
    assert '"key"' not in told


def test_a_wrong_key_opens_nothing(server: str) -> None:
    for key in ("", "another key"):
        with pytest.raises(Unauthorized, match="--api-key as api_key"):
            RemoteEngine(server, api_key=key).check()
        with pytest.raises(Unauthorized):
            RemoteEngine(server, api_key=key).generate(input_ids=[1, 2])


def test_the_lines_of_the_readme_run_as_pasted(server: str, said: list[str], folder: Path) -> None:
    (folder / "update.py").write_text(blocks("README.md", "python")[0])
    assert "publish" in "\n".join(ran("README.md", "update.py", server, folder))
    info = RemoteEngine(server, api_key=KEY).check()
    assert (info.version, info.verified) == ("step 1", "full")


@pytest.mark.sweep
def test_a_deepspeed_trainer_brings_its_weights(server: str, said: list[str], folder: Path) -> None:
    told = answers(ran(RECIPES, "train_zero3.py", server, folder, **{API_KEY: KEY}))
    assert list(told) == ["zero3 1", "zero3 2", "zero3 3"]
    assert told["zero3 1"] != told["zero3 3"] == LEARNED
    info = RemoteEngine(server, api_key=KEY).weights_info()
    assert (info.version, info.verified) == ("zero3 3", "full")
    assert info.layout is not None
    assert info.layout.trainer_ranks == 2


def test_a_megatron_trainer_brings_its_weights(server: str, said: list[str], folder: Path) -> None:
    told = answers(ran(RECIPES, "train_megatron.py", server, folder, **{API_KEY: KEY}))
    assert list(told) == ["megatron 1", "megatron 2"]
    assert told["megatron 2"] == LEARNED
    info = RemoteEngine(server, api_key=KEY).weights_info()
    assert (info.version, info.verified, info.torn) == ("megatron 2", "full", "")


def test_stock_updates_make_it_forget(server: str, said: list[str], folder: Path) -> None:
    """Runs last: what weights there are now, nobody has told."""
    engine = RemoteEngine(server, api_key=KEY)
    config = AutoConfig.from_pretrained(folder / "model")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "checkpoint")
    body = {"model_path": str(folder / "checkpoint"), "load_format": "auto"}
    answer = httpx.post(
        f"{server}/update_weights_from_disk", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
    )
    assert answer.json()["success"], answer.text
    info = engine.weights_info()
    assert (info.version, info.digest, info.session, info.layout) == ("megatron 2", "", "", None)
