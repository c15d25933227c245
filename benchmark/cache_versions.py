"""The prefix cache across updates, under conversations of several turns: `python -m benchmark.cache_versions`.

Clients hold conversations with an embedded engine, each of several turns after one system prompt that all share. Every
few seconds the engine is paused, updated and continued; the way says how, and what the update does to the cache:

flush       pause "retract", flush_cache=True: what running requests had is computed again
by version  pause "in_place", flush_cache="by_version": running requests go on with what they have
both        pause "retract", flush_cache="by_version"
keep        pause "in_place", flush_cache=False: everybody reads what old weights have computed

After a last update, to weights that are new, the engine answers two prompts that were in its cache before, and answers
them again with an empty cache.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark import pages
from benchmark.results import Row, Rows
from benchmark.world import find_tests
from sglang_reshard.protocol.messages import BY_VERSION, FlushCache

WAYS: dict[str, tuple[str, FlushCache]] = {
    "flush": ("retract", True),
    "by version": ("in_place", BY_VERSION),
    "both": ("retract", BY_VERSION),
    "keep": ("in_place", False),
}
CLIENTS, TURNS, SYSTEM_TOKENS, USER_TOKENS, NEW_TOKENS = 6, 5, 256, 24, 48
SECONDS, UPDATE_EVERY_S, CONTEXT = 40.0, 3.0, 1024
_COUNTER = "sglang:realtime_tokens_total"


class Clients:
    """Conversations with an embedded engine, in its event loop."""

    def __init__(self, engine: Any, seed: int) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self.system = self._words(SYSTEM_TOKENS)
        self.turns = self.prompt_tokens = self.cached_tokens = 0
        self._stop = False
        self._tasks = [engine.loop.create_task(self._talk()) for _ in range(CLIENTS)]

    def end(self) -> None:
        self._stop = True
        self._engine.loop.run_until_complete(asyncio.gather(*self._tasks))

    async def _talk(self) -> None:
        while not self._stop:
            said = list(self.system)
            for _ in range(TURNS):
                if self._stop:
                    return
                said += self._words(USER_TOKENS)
                output = await self._engine.async_generate(
                    input_ids=said, sampling_params={"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
                )
                self.turns += 1
                self.prompt_tokens += len(said)
                self.cached_tokens += output["meta_info"]["cached_tokens"]
                said += output["output_ids"]

    def _words(self, count: int) -> list[int]:
        return [self._random.randrange(5, 4000) for _ in range(count)]


def measure(engine: Any, states: Sequence[Any], way: str, seconds: float, every_s: float) -> Row:
    """Returns the row of a way.

    engine  a `VerlEngine`
    states  two that updates alternate between, and those of the last one

    Of the row, prompt_tokens are of all turns, cached_tokens were read from the cache when a turn began, and
    computed_tokens the engine computed in prefills, of turns and of requests that went on. pause_seconds is the median
    from the call of pause_generation to the end of continue_generation. cold: what the engine says at the end is what
    it says with an empty cache.
    """
    mode, flush_cache = WAYS[way]
    first = engine.engine
    engine.update_weights_from_tensor(states[0].items(), flush_cache=True)
    clients, computed = Clients(first, seed=7), _computed_tokens()
    pauses: list[float] = []
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        first.loop.run_until_complete(asyncio.sleep(every_s))
        paused = time.monotonic()
        engine.pause_generation(mode)
        engine.update_weights_from_tensor(states[(len(pauses) + 1) % 2].items(), flush_cache=flush_cache)
        engine.continue_generation()
        pauses.append(time.monotonic() - paused)
    clients.end()
    took = time.monotonic() - began
    computed = _computed_tokens() - computed
    prompts = [clients.system, clients.system[: SYSTEM_TOKENS // 2]]
    engine.update_weights_from_tensor(states[2].items(), flush_cache=flush_cache)
    warm = _answers(engine, prompts)
    engine.update_weights_from_tensor(states[2].items(), flush_cache=True)
    return {
        "way": way,
        "seconds": took,
        "updates": len(pauses),
        "turns": clients.turns,
        "prompt_tokens": clients.prompt_tokens,
        "cached_tokens": clients.cached_tokens,
        "computed_tokens": computed,
        "pause_seconds": statistics.median(pauses),
        "cold": warm == _answers(engine, prompts),
    }


def _answers(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    return [answer["output_ids"] for answer in engine.generate(input_ids=prompts, sampling_params=sampling)]


def _computed_tokens() -> int:
    """Returns how many tokens the schedulers have computed in prefills, from SGLang's metrics."""
    from prometheus_client import CollectorRegistry, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=os.environ["PROMETHEUS_MULTIPROC_DIR"])
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    return int(sum(s.value for s in samples if s.name == _COUNTER and s.labels["mode"] == "prefill_compute"))


def run(ways: Sequence[str], seconds: float, every_s: float) -> Rows:
    """Starts one engine, and measures one way after the other."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import Qwen3ForCausalLM

    from sglang_reshard.selftest import tiny_model

    find_tests()
    from support.live_engines import live_engine

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        tiny_model.save(Path(folder, "model"), 1, 1)
        states = []
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            states.append(dict(Qwen3ForCausalLM(tiny_model.config(1, 1)).named_parameters()))
        engine = live_engine(
            init_device_mesh("cpu", (1,)),
            Path(folder, "model"),
            load_format="dummy",
            dtype="float32",
            context_length=CONTEXT,
            enable_metrics=True,
            skip_tokenizer_init=True,
            max_total_tokens=65536,
        )
        try:
            return [measure(engine, states, way, seconds, every_s) for way in ways]
        finally:
            engine.shutdown()
            dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.cache_versions", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each way")
    parser.add_argument("--every-s", type=float, default=UPDATE_EVERY_S, help="an update")
    parser.add_argument("--out", type=Path, help="another file for the results; no document is written then")
    chosen = parser.parse_args()
    rows = run(tuple(WAYS), chosen.seconds, chosen.every_s)
    pages.publish("cache-versions", "python -m benchmark.cache_versions", rows, out=chosen.out)
    return 0 if all(row["cold"] for row in rows if row["way"] != "keep") else 1


if __name__ == "__main__":
    sys.exit(main())
