"""What the trainer ranks of test_stock_paths.py do: SGLang's own updates, pauses and cache, around ours."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from demo import text
from demo.reference import greedy_tokens
from oracle.digests import LOADER, read_live_digests
from reshard_job import PROMPTS, Job
from sglang_reshard.patches.launch import without_torchrun_variables
from sglang_reshard.testing import cpu_host

Digests = list[dict[str, str]]
LONG = [[(7 * i) % 400 + 3 for i in range(40)]]  # long enough for its beginning to be cached
IN_FLIGHT = 150  # new tokens of a request that is served while weights change: seconds, and a pause comes at the first
GREEDY = {"temperature": 0, "ignore_eos": True}


# -- SGLang's own updates


def stock_updates(engine: Any, folder: Path, name: str) -> dict[str, Digests]:
    """From disk to weights 1, from tensors to 2, from a process group to 1; the live tensors after each."""

    def digests(path: str) -> Digests:
        return read_live_digests(engine, folder / f"digests-{name}-{path}")

    one, two = folder / "checkpoint-1", folder / "checkpoint-2"
    seen = {}
    _succeeded(engine.update_weights_from_disk(str(one), load_format="auto"))
    seen["from_disk"] = digests("from_disk")
    _succeeded(engine.update_weights_from_tensor(list(load_file(two / "model.safetensors").items())))
    seen["from_tensor"] = digests("from_tensor")
    _from_distributed(engine, load_file(one / "model.safetensors"), name)
    seen["from_distributed"] = digests("from_distributed")
    return seen


def _succeeded(answer: Any) -> None:
    assert answer[0], answer[1]


def _from_distributed(engine: Any, state: dict[str, torch.Tensor], group_name: str) -> None:
    """SGLang's way from a trainer that is rank 0 of a group with all engine ranks."""
    from sglang.srt.utils import init_custom_process_group

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    size = 1 + engine.server_args.tp_size
    joined: list[Any] = []

    def join() -> None:
        joined.append(
            init_custom_process_group(
                backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=size, rank=0, group_name=group_name
            )
        )

    def send() -> None:
        for tensor in state.values():
            dist.broadcast(tensor, src=0, group=joined[0])

    with without_torchrun_variables():  # they say that torchrun keeps the store of every group
        beside(join, lambda: engine.init_weights_update_group("127.0.0.1", port, 1, size, group_name, "gloo"))
    dtypes = [str(t.dtype).removeprefix("torch.") for t in state.values()]
    shapes = [list(t.shape) for t in state.values()]
    beside(send, lambda: engine.update_weights_from_distributed(list(state), dtypes, shapes, group_name))
    _succeeded(engine.destroy_weights_update_group(group_name))


def beside(trainer_side: Any, engine_side: Any) -> None:
    thread = threading.Thread(target=trainer_side, daemon=True)
    thread.start()
    _succeeded(engine_side())
    thread.join(timeout=60)
    assert not thread.is_alive()


def without_the_plugin(job: dict[str, Any]) -> dict[str, Digests]:
    """The same updates of an engine that does not load the package's plugin."""
    cpu_host.activate(job["target_tp"])  # before SGLang's first import
    from sglang.srt.entrypoints.engine import Engine

    from sglang_reshard.patches.engine import end

    folder = Path(job["folder"])
    with without_torchrun_variables():
        engine = Engine(
            tp_size=job["target_tp"],
            model_path=str(Path(job["weights"]) / "model"),
            load_format="dummy",
            dtype=job["dtype"],
            custom_weight_loader=[LOADER],
            **cpu_host.engine_arguments(),
        )
    assert not hasattr(engine, "update_weights_distributed"), "the plugin was loaded"
    (folder / "checkpoint-1").symlink_to(Path(job["weights"]) / "checkpoint-1")
    (folder / "checkpoint-2").symlink_to(Path(job["weights"]) / "checkpoint-2")
    seen = stock_updates(engine, folder, "without")
    end(engine)
    return seen


# -- requests in flight, and the cache


_ON_THEIR_WAY_S = 1.0


class Flight:
    """A request of rank 0's that is being served while weights change."""

    def __init__(self, engine: Any, prompt: list[int], new_tokens: int) -> None:
        self._engine = engine
        self._first = asyncio.Event()
        self._task = engine.loop.create_task(self._generate(prompt, new_tokens))
        self.tokens: list[int] = []
        self.reason: dict[str, Any] = {}

    async def _generate(self, prompt: list[int], new_tokens: int) -> None:
        chunks = await self._engine.async_generate(
            input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": new_tokens}, stream=True
        )
        async for chunk in chunks:
            self.tokens = list(chunk["output_ids"])
            self.reason = chunk["meta_info"]["finish_reason"] or {}
            self._first.set()

    def pause(self, mode: str) -> int:
        """Wait for its first tokens, pause; how many tokens it had when the schedulers had paused."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        async def go() -> int:
            await self._first.wait()
            await self._engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=mode))
            # A control request is answered after the pause. Tokens that were made before it may still be on their
            # way: they come by the detokenizer, and the answer does not.
            await self._engine.tokenizer_manager.get_internal_state()
            had = -1
            while had < len(self.tokens):
                had = len(self.tokens)
                await asyncio.sleep(_ON_THEIR_WAY_S)
            return had

        return self._engine.loop.run_until_complete(go())

    def go_on(self) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        async def go() -> None:
            await self._engine.tokenizer_manager.continue_generation(ContinueGenerationReqInput())
            await self._task

        self._engine.loop.run_until_complete(go())
        return {"tokens": self.tokens, "reason": self.reason.get("type")}


def pauses(run: Job, first: Any) -> dict[str, Any]:
    """An update to weights 2 while a request of weights 1 is paused in each of SGLang's modes."""
    seen: dict[str, Any] = {}
    for mode in ("abort", "retract", "in_place"):
        to_weights(run, "1")
        flight = Flight(first, PROMPTS[0], IN_FLIGHT) if first else None
        had = flight.pause(mode) if flight else 0
        refusal = to_weights(run, "2", refused=mode == "in_place")
        if mode == "in_place":
            to_weights(run, "2", flush_cache=False)
        seen[mode] = {"had": had, "refusal": refusal, **(flight.go_on() if flight else {})}
        seen[mode]["after"] = run.tokens()
    return seen


def cache(run: Job, first: Any) -> dict[str, Any]:
    """A long prompt before and after an update that flushes, and after one that does not."""

    def ask() -> list[Any]:
        if first is None:
            return []
        (out,) = first.generate(input_ids=LONG, sampling_params={**GREEDY, "max_new_tokens": text.NEW_TOKENS})
        return [out["meta_info"]["cached_tokens"], out["output_ids"]]

    to_weights(run, "1")
    seen = {"cold": ask(), "warm": ask()}
    to_weights(run, "2")
    seen["after"] = ask()
    to_weights(run, "1", flush_cache=False)
    seen["without a flush"] = ask()
    return seen


def to_weights(run: Job, version: str, *, refused: bool = False, **options: Any) -> list[str]:
    """One of our updates, to the trainer's weights of that version."""
    named = run.states[version].items()
    if refused:
        return run.refusal(None, named=named, **options)
    run.engine.update_weights_from_tensor(named, **options)
    return []


# -- all of it


def around_our_updates(job: dict[str, Any]) -> dict[str, Any]:
    """SGLang's own updates before and after one of ours, then pauses and the cache."""
    run = Job(job)
    run.states = {}
    for version in ("1", "2"):
        run.step_and_save(version)
        run.states[version] = {n: p.detach().clone() for n, p in run.trainer.model.named_parameters()}
    first = run.engine.engine
    seen: dict[str, Any] = {}
    for name in ("before", "after"):
        seen[name] = stock_updates(first, run.folder, name) if first else {}
        dist.barrier()
        to_weights(run, "2")
        seen[f"ours {name}"] = run.live_digests(f"ours-{name}")
    seen["pauses"] = pauses(run, first)
    seen["cache"] = cache(run, first)
    seen["expected"] = {v: run.expected_tokens(v) for v in ("1", "2")} if first else {}
    if first:
        seen["long"] = {v: greedy_tokens(run.checkpoint(v), LONG, text.NEW_TOKENS, "float32")[0][0] for v in ("1", "2")}
        retracted = seen["pauses"]["retract"]
        had, tokens = retracted["had"], retracted["tokens"]
        old = greedy_tokens(run.checkpoint("1"), [PROMPTS[0]], had, "float32")[0][0]
        new = greedy_tokens(run.checkpoint("2"), [PROMPTS[0] + tokens[:had]], len(tokens) - had, "float32")[0][0]
        seen["retracted"] = old + new
    run.engine.shutdown()
    return seen
