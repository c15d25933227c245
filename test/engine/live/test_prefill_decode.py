"""Prefill and decode apart: both engines have the new weights after one update, and no answer is of two versions."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmark.reference import greedy_tokens
from sglang_reshard import MultiEngineSender, RemoteEngine
from sglang_reshard.cli.layouts import Source
from sglang_reshard.errors import EngineRefused
from sglang_reshard.patches.launch import without_torchrun_variables
from sglang_reshard.protocol.session import Session
from sglang_reshard.selftest import tiny_model
from sglang_reshard.selftest.children import free_port
from sglang_reshard.selftest.digests import LOADER, read_live_digests
from sglang_reshard.selftest.trainer import Trainer
from sglang_reshard.testing import cpu_host
from support import nixl_env
from support.nixl_env import needs_nixl
from support.servers import launch, serving
from support.sglangs import chosen
from support.trainers import run_trainers
from tools.oracle.stock import stock_digests

MODES = ("prefill", "decode")
# First NIXL's API with all memory in host memory, then NIXL.
NIXL = [str(Path(nixl_env.__file__).parent / "nixl_in_host_memory"), str(nixl_env.FOLDER)]
NEW_TOKENS, CLIENTS, UPDATES = 20, 3, 8
PROMPTS = [list(range(10 * i, 10 * i + 30)) for i in range(1, 7)]
_ANSWER_S = 120


def updates(job: dict[str, Any]) -> dict[str, Any]:
    """The live digests of both engines, by mode, their versions, and what an update without a pause is told."""
    sys.path[:0] = NIXL  # processes that are spawned have the same path
    folder = Path(job["folder"])
    model = folder / "model"
    tiny_model.save(model, 1, 1)
    cpu_host.activate(1)  # before SGLang's first import
    from sglang_reshard.patches.embedded_engine import EmbeddedEngine

    bootstrap = free_port()
    engines = {}
    for mode in MODES:
        arguments = cpu_host.engine_arguments(
            disaggregation_mode=mode,
            disaggregation_transfer_backend="nixl",
            disaggregation_bootstrap_port=bootstrap,
        )
        started = {"load_format": "dummy", "dtype": "float32", "custom_weight_loader": [LOADER]}
        engines[mode] = EmbeddedEngine.start({"model_path": str(model), **started, **arguments})
    trainer = _trainer()
    live = []
    with _sender({m: e.engine.update_weights_distributed for m, e in engines.items()}) as sender:
        told = _refused(sender, trainer)
        for engine in engines.values():
            engine.pause_generation()
        for number in range(2):
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.mul_(1.5)
            sender.update(trainer.model, weight_version=str(number), verify="full")
            live.append({m: read_live_digests(e.engine, folder / f"{m}-{number}")[0] for m, e in engines.items()})
            trainer.save_checkpoint(folder / f"checkpoint-{number}")
    versions = {m: e.engine.tokenizer_manager.server_args.weight_version for m, e in engines.items()}
    for engine in engines.values():
        engine.close()
    return {"live": live, "versions": versions, "told": told}


def serves(job: dict[str, Any]) -> dict[str, Any]:
    """What two servers answer while clients ask all the time, and two checkpoints' weights take turns.

    answers  number of a prompt, and tokens, of each request that no pause has aborted
    told     what an update without a pause is told
    """
    folder = Path(job["folder"])
    tiny_model.save(folder / "model", 1, 1)
    trainer, other = _trainer(), folder / "checkpoint-1"
    first = {name: _local(p).clone() for name, p in trainer.model.named_parameters()}
    trainer.save_checkpoint(folder / "checkpoint-0")
    with _Pair.served(folder) as pair, _sender({m: e.update_weights_distributed for m, e in pair.engines.items()}) as s:
        clients: _Clients | None = None
        for number in range(UPDATES):
            with torch.no_grad():
                for name, parameter in trainer.model.named_parameters():
                    _local(parameter).copy_(first[name].roll(number % 2, 0))
            if number == 1:
                trainer.save_checkpoint(other)
            pair.pause()
            s.update(trainer.model, weight_version=str(number))
            pair.go_on()
            clients = clients or _Clients(pair)
            clients.until_answered(10)
        assert clients is not None
        told = _refused(s, trainer)
        clients.until_answered(10)
        clients.end()
    return {"answers": clients.answers, "told": told}


class _Pair:
    """A prefill and a decode server."""

    def __init__(self, urls: dict[str, str], bootstrap: int) -> None:
        self.engines = {mode: RemoteEngine(url) for mode, url in urls.items()}
        self._urls, self._bootstrap, self._rooms = urls, bootstrap, count(1)

    @classmethod
    @contextmanager
    def served(cls, folder: Path) -> Iterator[_Pair]:
        bootstrap = free_port()
        variables = cpu_host.environment(1)
        path = os.pathsep.join([*NIXL, os.environ["PYTHONPATH"], variables["PYTHONPATH"]])
        variables |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        options = "--disaggregation-transfer-backend", "nixl", "--disaggregation-bootstrap-port", str(bootstrap)
        # By default SGLang registers host memory for retracted requests with CUDA.
        no_cuda = "--disaggregation-decode-retraction-backup", "cpu_tensor"
        prefill, decode = (
            serving(
                launch(folder / "model", 1, "--disaggregation-mode", mode, *options, *of_mode),
                variables,
                folder / f"{mode}.log",
            )
            for mode, of_mode in zip(MODES, ((), no_cuda), strict=True)
        )
        with without_torchrun_variables(), prefill as prefill_url, decode as decode_url:
            yield cls({"prefill": prefill_url, "decode": decode_url}, bootstrap)

    def pause(self) -> None:
        for engine in self.engines.values():
            engine.pause_generation("abort")

    def go_on(self) -> None:
        for engine in self.engines.values():
            engine.continue_generation()

    async def ask(self, http: httpx.AsyncClient, prompt: list[int]) -> list[int] | None:
        """The answer, as a router has it from the decode server; None if a pause has aborted the request."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._bootstrap,
            "bootstrap_room": next(self._rooms),
        }
        asked = [asyncio.ensure_future(http.post(f"{self._urls[mode]}/generate", json=body)) for mode in MODES]
        prefill, decode = asked
        try:
            # A server does not end its part of a request because the other one has aborted its own.
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            if not prefill.done() or not _whole(prefill.result(), 1):
                return None
            answer = await decode
            return answer.json()["output_ids"] if _whole(answer, NEW_TOKENS) else None
        finally:
            for task in asked:
                task.cancel()


def _whole(answer: httpx.Response, tokens: int) -> bool:
    return answer.status_code == 200 and len(answer.json()["output_ids"]) == tokens


class _Clients:
    """Ask without a break, each its prompts in turn."""

    def __init__(self, pair: _Pair) -> None:
        self._pair, self._ended = pair, threading.Event()
        self.answers: list[tuple[int, list[int]]] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask_all()))
        self._thread.start()

    async def _ask_all(self) -> None:
        async with httpx.AsyncClient(timeout=_ANSWER_S) as http:
            await asyncio.gather(*(self._ask(http, first) for first in range(CLIENTS)))

    async def _ask(self, http: httpx.AsyncClient, number: int) -> None:
        while not self._ended.is_set():
            if (tokens := await self._pair.ask(http, PROMPTS[number])) is not None:
                self.answers.append((number, tokens))
            number = (number + 1) % len(PROMPTS)

    def until_answered(self, more: int) -> None:
        wanted = len(self.answers) + more
        while len(self.answers) < wanted:
            assert self._thread.is_alive()
            self._ended.wait(0.01)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


@contextmanager
def _sender(sends: dict[str, Any]) -> Iterator[MultiEngineSender]:
    session = Session.host()
    sender = MultiEngineSender(session.address, trainer_rank=0, global_ranks=(0,), timeout_s=180)
    sender.set_engines(sends)
    yield sender
    sender.close()
    session.end(1)


def _refused(sender: MultiEngineSender, trainer: Trainer) -> str:
    try:
        sender.update(trainer.model, weight_version="without a pause")
    except EngineRefused as error:
        return str(error)
    return ""


def _trainer() -> Trainer:
    return Trainer(tiny_model.config(1, 1), Source())


def _local(parameter: Any) -> torch.Tensor:
    local: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    return local.detach()


pytestmark = [pytest.mark.engine, pytest.mark.sweep, needs_nixl]


def test_a_prefill_and_a_decode_engine_are_updated_in_one_update(tmp_path: Path) -> None:
    (seen,) = run_trainers(1, updates, tmp_path)
    checkpoints = [tmp_path / f"checkpoint-{number}" for number in range(2)]
    stock = stock_digests(tmp_path / "model", checkpoints, tp_size=1, dtype="float32")
    assert seen["live"] == [{"prefill": load[0], "decode": load[0]} for load in stock]
    assert seen["versions"] == {"prefill": "1", "decode": "1"}
    _told_to_pause(seen)


def test_an_answer_of_two_servers_is_of_one_version_of_the_weights(tmp_path: Path) -> None:
    """0.5.12 sends no answer's metadata by NIXL, unless the model has recurrent state or a sliding window."""
    with chosen("newest"):
        (seen,) = run_trainers(1, serves, tmp_path)
    said = [greedy_tokens(tmp_path / f"checkpoint-{n}", PROMPTS, NEW_TOKENS, "float32")[0] for n in range(2)]
    versions = [[tokens[number] for tokens in said].index(answer) for number, answer in seen["answers"]]
    assert len(versions) > 10 * UPDATES
    assert set(versions) == {0, 1}
    _told_to_pause(seen)


def _told_to_pause(seen: Mapping[str, str]) -> None:
    """Also while requests run, which then go on with their old weights."""
    for mode in ("prefill", "decode"):
        assert f"the {mode} server is not paused" in seen["told"]
