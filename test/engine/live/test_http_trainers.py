"""The examples of trainers without verl: each brings a server, by URL and key, to what it has learned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_reshard.api.remote_engine import API_KEY, RemoteEngine
from support import zygote
from support.deepspeed_env import FOLDER as DEEPSPEED
from support.servers import serving

pytestmark = [pytest.mark.engine]
EXAMPLE, KEY = Path(__file__).parents[3] / "examples" / "http", "a key of their own"
LEARNED = [13, 21, 34, 55, 89, 144]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainers")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    command = [sys.executable, str(EXAMPLE / "serve_on_cpu.py"), str(folder), "--api-key", KEY]
    with serving([*command, "--skip-server-warmup"], zygote.ORDINARY, folder / "log") as url:
        yield url


def answers(script: str, *arguments: str, path: str = "") -> dict[str, list[int]]:
    """Runs a trainer of two ranks. Returns version -> tokens that the engine said, as the trainer prints them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, API_KEY: KEY, "OMP_NUM_THREADS": "1"}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH", "")]))
    ran = subprocess.run(
        [*command, str(EXAMPLE / script), *arguments], env=environment, capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    told = [line for line in ran.stdout.splitlines() if " says " in line]
    return {line.partition(":")[0]: json.loads(line.partition(" says ")[2]) for line in told}


def test_a_deepspeed_trainer_brings_its_weights(server: str, folder: Path) -> None:
    said = answers("train_zero3.py", str(folder / "model"), server, path=str(DEEPSPEED))
    assert list(said) == ["zero3 1", "zero3 2", "zero3 3"]
    assert said["zero3 1"] != said["zero3 3"] == LEARNED
    info = RemoteEngine(server, api_key=KEY).weights_info()
    assert (info.version, info.verified) == ("zero3 3", "full")
    assert info.layout is not None
    assert info.layout.trainer_ranks == 2


def test_a_megatron_trainer_brings_its_weights(server: str, folder: Path) -> None:
    address = server.removeprefix("http://")
    said = answers("train_megatron.py", str(folder / "model"), "--rollout-external-engine-addrs", address)
    assert list(said) == ["megatron 1", "megatron 2"]
    assert said["megatron 2"] == LEARNED
    info = RemoteEngine(server, api_key=KEY).weights_info()
    assert (info.version, info.verified, info.torn) == ("megatron 2", "full", "")
