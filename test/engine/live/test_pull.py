"""A stock server takes the live weights of another one of another TP size, by URL and key, without the trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmark.reference import greedy_tokens
from server_job import PROMPTS, Client
from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.protocol.session import Session
from sglang_reshard.selftest import text, tiny_model
from sglang_reshard.testing import cpu_host
from support.live_engines import greedy
from support.servers import launch, serving

pytestmark = [pytest.mark.engine]
SIZES, KEYS = (2, 1), ("the first one's key", "the second one's key")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pull")
    tiny_model.save(folder / "model", *SIZES)
    return folder / "model"


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[list[RemoteEngine]]:
    """Two servers on dummy weights, each with an admin key of its own."""
    with ExitStack() as stack:
        found = []
        for tp, key in zip(SIZES, KEYS, strict=True):
            command = launch(model, tp, "--admin-api-key", key)
            url = stack.enter_context(serving(command, cpu_host.environment(tp), model.parent / f"log.{tp}"))
            found.append(RemoteEngine(url, api_key="", admin_api_key=key, timeout_s=180))
        yield found


def train(server: RemoteEngine, weights: dict[str, torch.Tensor], version: str) -> Any:
    send = server.update_weights_distributed
    sender = WeightSender.within(Session.host(), trainer_rank=0, global_ranks=(0,), send=send, timeout_s=180)
    try:
        return sender.update(weights.items(), weight_version=version, verify="full")
    finally:
        sender.close()


def tokens(server: RemoteEngine) -> list[list[int]]:
    return greedy(server, PROMPTS, text.NEW_TOKENS)


def pull(source: RemoteEngine, target: RemoteEngine) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_reshard", "pull", "--from", source.url, "--to", target.url]
    prefix = "SGLANG_RESHARD"
    keys = {f"{prefix}_FROM_ADMIN_API_KEY": source.admin_api_key, f"{prefix}_ADMIN_API_KEY": target.admin_api_key}
    return subprocess.run(command, env=os.environ | keys, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    trained = AutoModelForCausalLM.from_config(tiny_model.config(*SIZES), dtype=torch.float32)
    trained.save_pretrained(model.parent / "trained")
    return dict(trained.named_parameters())


def test_nothing_is_shared_before_the_first_update(servers: list[RemoteEngine]) -> None:
    done = pull(*servers)
    assert done.returncode == 1
    assert "not brought by an update of sglang-reshard" in done.stderr
    assert servers[1].weights_info().missing, "it has no weights either"


def test_a_server_takes_what_another_one_has(
    servers: list[RemoteEngine], checkpoint: dict[str, torch.Tensor], model: Path
) -> None:
    first, second = servers
    report = train(first, checkpoint, "7")  # and the trainer is gone
    expected, _ = greedy_tokens(model.parent / "trained", PROMPTS, text.NEW_TOKENS, "float32")
    client = Client(first.url, first.admin_api_key, text.NEW_TOKENS)
    client.start()
    done = pull(first, second)
    client.end()
    assert done.returncode == 0, done.stderr
    assert report.digest in done.stdout
    info = second.weights_info()
    assert (info.version, info.digest, info.torn) == ("7", report.digest, "")
    assert info.layout is not None
    assert info.layout.trainer_ranks == SIZES[0]
    assert tokens(second) == expected
    assert client.answers
    assert all(said == expected[0] for _, _, said in client.answers)


def test_both_follow_the_trainer_again_and_pass_weights_back(
    servers: list[RemoteEngine], checkpoint: dict[str, torch.Tensor]
) -> None:
    first, second = servers
    newer = {name: tensor * 0.9 for name, tensor in checkpoint.items()}
    digest = train(second, newer, "8").digest
    done = first.pull_weights(second.url, admin_api_key=second.admin_api_key, timeout_s=60, transport="p2p")
    assert done.success, done.message
    assert first.weights_info().transport == "p2p"
    assert (first.weights_info().version, first.weights_info().digest) == ("8", digest)
    assert tokens(first) == tokens(second)
    assert train(first, checkpoint, "9").digest != digest


def test_a_server_does_not_pull_from_itself(servers: list[RemoteEngine]) -> None:
    done = pull(servers[0], servers[0])
    assert done.returncode == 1
    assert "an update of it is running" in done.stderr
    assert tokens(servers[0]) != []


def test_wrong_keys_and_urls_are_told(servers: list[RemoteEngine]) -> None:
    first, second = servers
    wrong = first.pull_weights(second.url, admin_api_key="wrong", timeout_s=180)
    assert not wrong.success
    assert "did not accept the key" in wrong.message
    nowhere = first.pull_weights("http://127.0.0.1:9", timeout_s=180)
    assert "did not answer" in nowhere.message
    answer = httpx.post(f"{first.url}/share_weights", content=b"{}")
    assert answer.status_code == 401
    answer = httpx.post(
        f"{first.url}/share_weights", content=b"{}", headers={"Authorization": f"Bearer {first.admin_api_key}"}
    )
    assert answer.status_code == 400
    assert httpx.post(f"{first.url}/pull_weights", content=b"{}").status_code == 401


def test_a_pull_is_refused_by_another_protocol(servers: list[RemoteEngine]) -> None:
    first, _ = servers
    headers = {"Authorization": f"Bearer {first.admin_api_key}"}
    answer = httpx.post(f"{first.url}/share_weights", json={"package_version": "0.0.1"}, headers=headers)
    assert answer.status_code == 400
    assert "0.0.1" in answer.json()["error"]["message"]
