"""An engine with torn weights serves nobody, says why wherever it is asked, and serves again once it is whole.

And an engine that loses a process fails the trainer's calls, not the trainer.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from sglang_reshard import WeightSender
from sglang_reshard.patches.sound_weights import SERVE_DUMMY
from sglang_reshard.selftest import tiny_model
from sglang_reshard.testing import cpu_host
from support.servers import launch, serving
from support.trainers import run_trainers

pytestmark = [pytest.mark.engine]
TP = 2

# -- in the trainer's process; see torn_job.py

REASON = "engine rank 1 has half of update 7"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (seen,) = run_trainers(1, "torn_job:all_of_it", tmp_path_factory.mktemp("torn"))
    return seen


WAYS = ["generate", "batch", "several", "stream", "async", "encode", "VerlEngine"]
LOOK_S = 10.0  # seconds that an answer may take after a process has gone


def test_whoever_asks_a_torn_engine_or_waited_while_it_tore_is_told_why(seen: dict[str, Any]) -> None:
    torn, told = seen["torn"], ["TornWeights", REASON]
    assert torn["refused"] == dict.fromkeys(WAYS, told)
    assert torn["waited"] == dict.fromkeys(["for a pause", "for an update", "for the tokenizer"], told)
    assert torn["left"] == [], "SGLang waits for all that are on its list before it ends on SIGTERM"
    assert torn["after"] == torn["before"], "healed, it says what it said before"


def test_a_paused_request_gets_no_token_of_torn_weights(seen: dict[str, Any]) -> None:
    flights = dict(seen["torn"]["flights"])
    healed = flights.pop("healed")
    assert healed["reason"] == "length"
    assert healed["tokens"] > healed["had"] > 0
    assert len(flights) == 4
    for name, flown in flights.items():
        assert flown["reason"] == "abort", name
        assert flown["tokens"] == flown["had"] > 0, name


@pytest.mark.parametrize("call", ["generate", "update"])
def test_a_call_under_way_says_which_process_has_gone(seen: dict[str, Any], call: str) -> None:
    lost = seen["lost"][call]
    assert f"scheduler_TP1 (process {lost['pid']}) ended with exit code -9" in lost["told"][1]
    assert lost["seconds"] < 1 + LOOK_S  # it goes after one second


@pytest.mark.parametrize("call", ["after a step", "update after a step"])
def test_so_does_the_next_call(seen: dict[str, Any], call: str) -> None:
    """SGLang's way, a signal to the trainer while it trains, would make this call wait for ever."""
    told, seconds = seen["lost"][call]["told"], seen["lost"][call]["seconds"]
    assert f"scheduler_TP1 (process {seen['lost']['update']['pid']}) ended with exit code -9" in told[1]
    assert seconds < LOOK_S


def test_the_next_engine_starts_in_the_same_process_and_the_trainer_keeps_its_signals(seen: dict[str, Any]) -> None:
    assert seen["lost"]["same tokens"]
    had, left = seen["lost"]["segments"]
    assert had > 0
    assert left == []
    assert seen["terminated"] == [15]
    assert seen["quit"]


# -- a server

NEW_TOKENS = 6
SAMPLING = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "A shard"}], "max_tokens": NEW_TOKENS}
SERVING: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", {"input_ids": [5, 6, 7], "sampling_params": SAMPLING}),
    "generate, batch": ("/generate", {"input_ids": [[5, 6], [7]], "sampling_params": SAMPLING}),
    "generate, stream": ("/generate", {"input_ids": [5, 6, 7], "sampling_params": SAMPLING, "stream": True}),
    "completions": ("/v1/completions", {"model": "m", "prompt": "A shard", "max_tokens": NEW_TOKENS}),
    "completions, stream": (
        "/v1/completions",
        {"model": "m", "prompt": "A shard", "max_tokens": NEW_TOKENS, "stream": True},
    ),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "responses": ("/v1/responses", {"model": "m", "input": "A shard", "max_output_tokens": NEW_TOKENS}),
    "messages, stream": ("/v1/messages", {**CHAT, "stream": True}),
    "ollama, stream": (
        "/api/generate",
        {"model": "m", "prompt": "A shard", "stream": True, "options": {"num_predict": NEW_TOKENS}},
    ),
}
CONTROL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "server_info": ("GET", "/server_info", {}),
    "model_info": ("GET", "/model_info", {}),
    "flush_cache": ("POST", "/flush_cache", {}),
    "pause": ("POST", "/pause_generation", {"mode": "retract"}),
    "continue": ("POST", "/continue_generation", {}),
    "abort": ("POST", "/abort_request", {"rid": "nobody's"}),
    "release": ("POST", "/release_memory_occupation", {"tags": ["weights"]}),
    "resume": ("POST", "/resume_memory_occupation", {"tags": ["weights"]}),
}


class Server:
    def __init__(self, url: str, checkpoint: Path) -> None:
        self.url, self.checkpoint = url, checkpoint

    def ask(self, name: str) -> httpx.Response:
        path, body = SERVING[name]
        return httpx.post(self.url + path, json=body, timeout=60)

    def control(self, name: str) -> httpx.Response:
        method, path, body = CONTROL[name]
        return httpx.request(method, self.url + path, json=body if method == "POST" else None, timeout=60)

    def probe(self, told: dict[str, str]) -> int:
        return httpx.post(f"{self.url}/torn_probe", json=told, timeout=10).raise_for_status().json()

    def load(self, folder: Path) -> httpx.Response:
        body = {"model_path": str(folder), "load_format": "auto"}
        return httpx.post(f"{self.url}/update_weights_from_disk", json=body, timeout=60)

    def tokens(self) -> list[int]:
        return self.ask("generate").raise_for_status().json()["output_ids"]

    def gauge(self) -> list[str]:
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        return re.findall(r"^sglang_reshard_torn(?:\{.*\})? (\S+)$", text, re.MULTILINE)

    @contextlib.contextmanager
    def torn(self, reason: str = REASON) -> Iterator[None]:
        self.probe({"reason": reason})
        try:
            yield
        finally:
            self.probe({"reason": ""})


def refuses(answer: httpx.Response) -> bool:
    return answer.status_code == 503 and answer.json() == {
        "error": {"message": REASON, "type": "TornWeights", "code": 503}
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A TP=2 server on dummy weights, and a checkpoint of others."""
    from transformers import Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("server")
    tiny_model.save(folder / "model", TP, TP)
    tiny_model.save(folder / "checkpoint", TP, TP)
    Qwen3ForCausalLM(tiny_model.config(TP, TP)).save_pretrained(folder / "checkpoint")
    program = [str(Path(__file__).with_name("torn_server.py"))]
    command = launch(folder / "model", TP, "--chat-template", "chatml", "--enable-metrics", program=program)
    with serving(command, {**cpu_host.environment(TP), SERVE_DUMMY: "1"}, folder / "log") as url:
        yield Server(url, folder / "checkpoint")


def until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.1)


@pytest.mark.parametrize("name", SERVING)
def test_every_serving_endpoint_says_503_and_why(server: Server, name: str) -> None:
    assert server.ask(name).status_code == 200
    with server.torn():
        assert refuses(server.ask(name))
    assert server.ask(name).status_code == 200


def test_embeddings_are_refused_too(server: Server) -> None:
    """This model has none to give; it says so when it is sound."""
    body = {"input_ids": [5, 6]}
    assert httpx.post(f"{server.url}/encode", json=body, timeout=60).status_code != 503
    with server.torn():
        assert refuses(httpx.post(f"{server.url}/encode", json=body, timeout=60))


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
def test_a_torn_server_is_not_healthy(server: Server, path: str) -> None:
    with server.torn():
        assert refuses(httpx.get(server.url + path, timeout=30))
    assert httpx.get(server.url + path, timeout=30).status_code == 200


def test_the_gauge_shows_it(server: Server) -> None:
    assert [float(value) for value in server.gauge()] == [0]
    with server.torn():
        assert [float(value) for value in server.gauge()] == [1]
    assert [float(value) for value in server.gauge()] == [0]


def test_who_waited_for_a_pause_to_end_gets_503_too(server: Server) -> None:
    """Streams as well: nothing of their answers may be sent before it is known that there will be one."""
    before = server.probe({})  # SGLang itself leaves requests on its list that fail before they are sent
    assert server.control("pause").status_code == 200
    try:
        with ThreadPoolExecutor(len(SERVING)) as pool:
            asked = {name: pool.submit(server.ask, name) for name in SERVING}
            several = sum(isinstance(body.get("input_ids", [0])[0], list) for _, body in SERVING.values())
            until(lambda: server.probe({}) == before + len(SERVING) + several, "not all requests came to wait")
            with server.torn():
                assert server.control("continue").status_code == 200
                answers = {name: future.result(timeout=60) for name, future in asked.items()}
    finally:
        server.control("continue")
    assert [name for name, answer in answers.items() if not refuses(answer)] == []
    assert server.probe({}) == before
    assert len(server.tokens()) == NEW_TOKENS


@pytest.mark.parametrize("name", CONTROL)
def test_control_requests_go_on_working(server: Server, name: str) -> None:
    with server.torn():
        assert server.control(name).status_code == 200


def test_tokens_are_the_same_when_it_is_healed(server: Server) -> None:
    before = server.tokens()
    with server.torn():
        assert refuses(server.ask("generate"))
    assert server.tokens() == before


def test_a_stock_load_heals_and_a_failed_one_does_not(server: Server, tmp_path: Path) -> None:
    before = server.tokens()
    server.probe({"reason": REASON})
    assert server.load(tmp_path / "nothing").status_code == 400
    assert refuses(server.ask("generate"))
    one = tmp_path / "one"  # tensor: SGLang loads it, and reports success
    shutil.copytree(server.checkpoint, one, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({"model.norm.weight": torch.ones(tiny_model.config(TP, TP).hidden_size)}, one / "model.safetensors")
    assert "still serves no request: engine rank" in server.load(one).json()["message"]
    assert refuses(server.ask("generate"))
    assert server.load(server.checkpoint).status_code == 200
    assert [float(value) for value in server.gauge()] == [0]
    assert server.tokens() != before
    assert server.load(one).status_code == 200, "a sound engine takes what a user gives it"
    assert [float(value) for value in server.gauge()] == [0]


TWO_WORKLOADS = Path(__file__).parents[3] / "docs" / "recipes" / "kubernetes" / "two-workloads.yaml"


def repair(job: dict[str, Any]) -> str:
    """The trainer: one rank, which has the checkpoint."""
    sender = WeightSender(job["url"])
    report = sender.update(load_file(job["checkpoint"]), weight_version="whole", verify="full")
    sender.close()
    return report.transport


def test_a_torn_engine_is_not_ready_and_the_trainer_of_the_manifest_repairs_it(server: Server, tmp_path: Path) -> None:
    """As Kubernetes does by the manifest: a Service leads to ready pods, or to all with `publishNotReadyAddresses`."""
    objects = {(o["kind"], o["metadata"]["name"]): o["spec"] for o in yaml.safe_load_all(TWO_WORKLOADS.read_text())}
    (engine,) = objects["Deployment", "engine"]["template"]["spec"]["containers"]
    pod = objects["Job", "trainer"]["template"]["spec"]
    urls = {
        v["value"] for c in pod["initContainers"] + pod["containers"] for v in c["env"] if v["name"].endswith("_URL")
    }
    (to_update,) = (urlsplit(url).hostname for url in urls)

    def leads_to_the_engine(service: str) -> bool:
        ready = httpx.get(server.url + engine["readinessProbe"]["httpGet"]["path"], timeout=30).status_code < 400
        return ready or objects["Service", service].get("publishNotReadyAddresses", False)

    assert leads_to_the_engine("engine")
    server.probe({"reason": REASON})
    assert not leads_to_the_engine("engine")
    assert leads_to_the_engine(to_update)
    assert "/weights_info" in pod["initContainers"][0]["args"][0]
    assert httpx.get(f"{server.url}/weights_info", timeout=30).json()["torn"] == REASON
    checkpoint = str(server.checkpoint / "model.safetensors")
    assert run_trainers(1, repair, tmp_path, url=server.url, checkpoint=checkpoint) == ["ipc"]
    assert leads_to_the_engine("engine")
    assert server.ask("generate").json()["meta_info"]["weight_version"] == "whole"
