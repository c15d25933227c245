"""An engine of all trainer ranks, and what SGLang's own loads of the trainer's checkpoints leave in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from configurations import GPUS, TRAINERS, Engine, Layout
from sglang_reshard import VerlEngine, WeightSender
from sglang_reshard.selftest.digests import LOADER, Digests, differing, read_live_digests
from sglang_reshard.selftest.engines import ON_GPUS
from sglang_reshard.testing import cpu_host
from sglang_reshard.trainer.collectives import on_first_rank
from sharded_trainer import VERSIONS, Trainer, save_checkpoint

PROMPT = [5, 6, 7, 8, 100, 200]
NEW_TOKENS = 1000 if GPUS else 48  # long enough to go on while an update begins
CONTEXT_LENGTH = 4096
ENDLESS = CONTEXT_LENGTH - 96  # tokens of a request that is aborted, however slow its update is
TIMEOUT_S = 120.0
GREEDY = {"temperature": 0, "ignore_eos": True}


class JudgedEngine:
    """Every trainer rank makes it and calls its methods in step; the first one has the engine.

    version  of the weights that the last update has brought
    """

    def __init__(self, configuration: Engine, folder: Path) -> None:
        self.configuration, self.first = configuration, dist.get_rank() == 0
        self.shapes = configuration.model.shapes()
        self._folder = folder / configuration.name
        if self.first:
            for version in VERSIONS:
                self._write(version)
        self._mesh = init_device_mesh("cpu", (TRAINERS,), mesh_dim_names=("all",))
        self._verl_engine = self._start()
        self.sglang = self._verl_engine.engine
        self.stock: dict[str, Digests] = {}
        self.said: dict[str, list[int]] = {}
        try:
            on_first_rank(self._load_by_stock, self._mesh.get_group())
        except Exception:
            self.shutdown()
            raise
        self.version, self._names = "", 0

    def checkpoint(self, version: str) -> Path:
        return self._folder / version

    @contextmanager
    def sender(self, **options: Any) -> Iterator[WeightSender]:
        """Yields a sender of the route that `options` ask for, or of one that these GPUs allow."""
        if not self.configuration.shares_gpus:
            options = {"transport": "p2p", **options}
        send = None if self.sglang is None else self.sglang.update_weights_distributed
        sender = WeightSender.over(self._mesh.get_group(), send, timeout_s=TIMEOUT_S, **options)
        try:
            yield sender
        finally:
            sender.close()

    def trainer(self, layout: Layout) -> Trainer:
        return Trainer(self.shapes, layout)

    def update(self, sender: WeightSender, trainer: Trainer, version: str, **options: Any) -> Any:
        """Updates the engine, and compares it with a stock load. Returns the report."""
        trainer.become(version)
        report = sender.update(list(trainer.named.items()), weight_version=self.name_of(version), **options)
        self.assert_has(version)
        self.version = version
        return report

    def name_of(self, version: str) -> str:
        """Returns a new weight_version, as an engine refuses one that it has."""
        self._names += 1
        return f"{version}, update {self._names}"

    def assert_has(self, version: str) -> None:
        """Compares every live tensor of every engine rank, on the first trainer rank."""
        if self.first:
            assert differing(self._digests(), self.stock[version])[:5] == []

    def another_version(self) -> str:
        return "b" if self.version == "a" else "a"

    def say(self) -> list[int]:
        """Returns the tokens after a prompt, on the first trainer rank."""
        return self._generate()["output_ids"] if self.sglang is not None else []

    def say_with_log_probs(self, new_tokens: int) -> list[tuple[float, int]]:
        """Returns (log-probability, token), on the first trainer rank."""
        said = self._generate(new_tokens, return_logprob=True)["meta_info"]["output_token_logprobs"]
        return [(log_prob, token) for log_prob, token, *_ in said]

    def begin_request(self, new_tokens: int = NEW_TOKENS) -> Request | None:
        """Begins a request on the first trainer rank and waits for its first token."""
        return None if self.sglang is None else Request(self.sglang, new_tokens)

    def on_engine(self, method: str, *arguments: Any) -> None:
        """Calls a method of VerlEngine, on all trainer ranks."""
        getattr(self._verl_engine, method)(*arguments)

    def shutdown(self) -> None:
        self._verl_engine.shutdown()

    def _write(self, version: str) -> None:
        folder = self.checkpoint(version)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.configuration.model.config()))
        save_checkpoint(self.shapes, version, folder)

    def _start(self) -> VerlEngine:
        """SGLang loads version "a" itself, in the processes that it starts."""
        server_args = {"skip_tokenizer_init": True, "context_length": CONTEXT_LENGTH, "custom_weight_loader": [LOADER]}
        server_args |= {"dtype": "bfloat16", "log_level": "warning", **self.configuration.server_args}
        if GPUS:
            server_args |= {**ON_GPUS, "mem_fraction_static": 0.3, "base_gpu_id": self.configuration.first_gpu}
        else:
            cpu_host.activate(self.configuration.tp_size)
            server_args = cpu_host.engine_arguments(**server_args)
        tp_size = self.configuration.tp_size
        return VerlEngine(self._mesh, tp_size=tp_size, model_path=str(self.checkpoint("a")), **server_args)

    def _load_by_stock(self) -> None:
        for version in VERSIONS:
            if version != VERSIONS[0]:
                loaded, *why = self.sglang.update_weights_from_disk(str(self.checkpoint(version)), load_format="auto")
                assert loaded, why
            self.stock[version] = self._digests()
            if self.configuration.generates:
                self.said[version] = self.say()
        for version, other in (("a", "b"), ("b", "c")):
            assert all(of != than for of, than in zip(self.stock[version], self.stock[other], strict=True))
        assert len(set(map(str, self.said.values()))) in (0, len(VERSIONS))

    def _digests(self) -> Digests:
        return read_live_digests(self.sglang, self._folder / "digests")

    def _generate(self, new_tokens: int = NEW_TOKENS, **options: Any) -> dict[str, Any]:
        sampling = {**GREEDY, "max_new_tokens": new_tokens}
        return self.sglang.generate(input_ids=PROMPT, sampling_params=sampling, **options)


class Request:
    """A request that is served while the weights change."""

    def __init__(self, engine: Any, new_tokens: int) -> None:
        self._engine, self._has_begun = engine, asyncio.Event()
        self._task = engine.loop.create_task(self._run({**GREEDY, "max_new_tokens": new_tokens}))
        engine.loop.run_until_complete(self._has_begun.wait())
        assert not self._task.done()

    async def _run(self, sampling: dict[str, Any]) -> dict[str, Any]:
        last: dict[str, Any] = {}
        try:
            async for chunk in await self._engine.async_generate(
                input_ids=PROMPT, sampling_params=sampling, stream=True
            ):
                last = chunk
                self._has_begun.set()
        finally:
            self._has_begun.set()
        return last

    def end(self) -> tuple[list[int], str]:
        """Waits for its end. Returns its tokens and the reason."""
        last = self._engine.loop.run_until_complete(self._task)
        return list(last["output_ids"]), last["meta_info"]["finish_reason"]["type"]
