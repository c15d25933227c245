"""Trainers of other Pythons and torches, with the wheel alone, update servers of both ends of SGLang's range by URL."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import Qwen3ForCausalLM

from benchmark.reference import greedy_tokens
from sglang_reshard.selftest import text, tiny_model
from sglang_reshard.testing import cpu_host
from support import environments, nixl_env
from support.environments import NIXL, Environment
from support.servers import launch, serving
from support.sweep import sweep

pytestmark = [pytest.mark.matrix, pytest.mark.engine]
RANKS, TP, KEY, PROMPTS = 2, 2, "the admin's key", [[5, 6, 7, 8], [100, 200]]
TRANSPORTS = ("ipc", "p2p", "broadcast")
# Python, requirements, and whether to take the lowest versions that the wheel declares.
TRAINERS = {
    "3.10, lowest": ("3.10", (), True),
    "3.12, torch 2.11": ("3.12", ("torch==2.11.0", *NIXL), False),
    "3.13, newest": ("3.13", NIXL, False),
    "3.10, newest": ("3.10", NIXL, False),
    "3.12, newest": ("3.12", NIXL, False),
    "3.12, torch 2.10": ("3.12", ("torch==2.10.0", *NIXL), False),
    "3.13, torch 2.10": ("3.13", ("torch==2.10.0", *NIXL), False),
    "3.13, torch 2.11": ("3.13", ("torch==2.11.0", *NIXL), False),
}
SHOWN = ("3.10, lowest", "3.12, torch 2.11", "3.13, newest")
# By its own pins: torch 2.14, transformers 5.19.
SERVERS = ("0.5.12", "0.5.23")
_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Server:
    url: str
    sglang: str


@dataclass(frozen=True)
class Weights:
    """A file of weights, and the tokens that transformers generates with them."""

    path: Path
    tokens: list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    tiny_model.save(folder, RANKS, TP)
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """One for each transport."""
    found, folder = [], tmp_path_factory.mktemp("weights")
    for number in range(len(TRANSPORTS) + 1):
        torch.manual_seed(number)
        trained = Qwen3ForCausalLM(tiny_model.config(RANKS, TP))
        trained.save_pretrained(folder / str(number))
        torch.save(dict(trained.named_parameters()), folder / f"{number}.pt")
        tokens, _ = greedy_tokens(folder / str(number), PROMPTS, text.NEW_TOKENS, "float32")
        found.append(Weights(folder / f"{number}.pt", tokens))
    return found


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, model: Path, wheel: Path) -> Iterator[Server]:
    """A TP=2 server on dummy weights: SGLang of these tests' environment, or of its own."""
    command, variables = launch(model, TP, "--admin-api-key", KEY), cpu_host.environment(TP)
    if request.param == "0.5.12":
        variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(nixl_env.FOLDER)])
    else:
        own = environments.newest_sglang(wheel)
        command[0] = str(own.python)
        variables = own.engine_variables(TP)
    with serving(command, variables, model.with_name("log")) as url:
        headers = {"Authorization": f"Bearer {KEY}"}
        told = httpx.get(f"{url}/server_info", headers=headers, trust_env=False).json()
        assert told["version"] == request.param
        yield Server(url, told["version"])


@pytest.fixture(scope="module")
def digests() -> dict[Path, str]:
    """The digest of each file of weights, by the first environment that updated a server with it."""
    return {}


@pytest.mark.parametrize("name", [name if name in SHOWN else sweep(name) for name in TRAINERS])
def test_a_trainer_updates_a_server(
    server: Server,
    weights: list[Weights],
    digests: dict[Path, str],
    wheel: Path,
    name: str,
    tmp_path: Path,
    record_property: Any,
) -> None:
    python, requirements, lowest = TRAINERS[name]
    folder = f"trainer-{name.replace(', ', '-').replace(' ', '')}"
    trainer = environments.install(folder, python, wheel, requirements, lowest)
    transports = (*TRANSPORTS, *(["nixl"] if set(NIXL) <= set(requirements) else []))
    sent = list(zip(transports, weights, strict=False))
    began = time.monotonic()
    seen = run(trainer, tmp_path, url=server.url, environment=name, weights=[(way, str(of.path)) for way, of in sent])
    assert [update["transport"] for update in seen] == list(transports)
    assert [update["version"] for update in seen] == [f"{name}, {transport}, warm" for transport in transports]
    for update, (_, of) in zip(seen, sent, strict=True):
        assert update["tokens"] == of.tokens
        assert update["digests"] == [digests.setdefault(of.path, update["digests"][0])] * 2
    says = f"{', '.join(transports)}: two updates each, digests and tokens"
    record_property("matrix", trainer.row("update by URL", says, time.monotonic() - began, sglang=server.sglang))


def test_weights_differ(weights: list[Weights]) -> None:
    """Otherwise tokens would say nothing."""
    assert len({str(of.tokens) for of in weights}) == len(weights)


def run(trainer: Environment, folder: Path, **job: Any) -> list[dict[str, Any]]:
    """Returns what trainer rank 0 saw of each update, in order."""
    results = folder / "results.json"
    job |= {"key": KEY, "prompts": PROMPTS, "new_tokens": text.NEW_TOKENS, "results": str(results)}
    command = [trainer.python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
               Path(__file__).with_name("url_job.py"), json.dumps(job)]  # fmt: skip
    variables = trainer.variables(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=_DEADLINE_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(results.read_text())
