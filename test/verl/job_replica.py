"""verl's SGLang replicas in a test's job: asked for tokens, and for digests of all they hold."""

from __future__ import annotations

import asyncio
import base64
import uuid
from pathlib import Path
from typing import Any

import httpx
import ray
import torch

from oracle.digests import read_live_digests


class JobReplica:
    """One of verl's own SGLang servers, with engine ranks of its own or those of a trainer's workers.

    workers  the worker group whose devices it shares; None for devices of its own
    """

    def __init__(self, config: Any, replica_rank: int, workers: Any = None) -> None:
        from verl.workers.rollout.replica import get_rollout_replica_class

        rollout = config.actor_rollout_ref.rollout
        self.tp_size: int = rollout.tensor_model_parallel_size
        self.replica = get_rollout_replica_class("sglang")(
            replica_rank=replica_rank,
            config=rollout,
            model_config=config.actor_rollout_ref.model,
            gpus_per_node=config.trainer.n_gpus_per_node,
        )
        asyncio.run(self.replica.init_standalone() if workers is None else self.replica.init_hybrid(workers))

    def ask(self, prompt: list[int], new_tokens: int) -> Any:
        """A reference to verl's TokenOutput, greedy."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        return self.replica.server_handle.generate.remote(
            prompt_ids=prompt, sampling_params=sampling, request_id=uuid.uuid4().hex
        )

    def tokens(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        return [list(output.token_ids) for output in ray.get([self.ask(p, new_tokens) for p in prompts])]

    def live_digests(self, folder: Path) -> list[dict[str, str]]:
        """Of all live tensors, by engine rank. The server has to allow `oracle.digests.LOADER`."""
        return read_live_digests(_HttpEngine(self.replica.server_address, self.tp_size), folder)


class _HttpEngine:
    """As much of `sglang.Engine` as reading digests takes, of a server."""

    def __init__(self, address: str, tp_size: int) -> None:
        self.address, self.server_args = address, self
        self.tp_size = tp_size

    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, torch.Tensor]], load_format: str, flush_cache: bool
    ) -> tuple[bool, str]:
        from sglang.srt.utils import MultiprocessingSerializer

        packed = [MultiprocessingSerializer.serialize(named_tensors) for _ in range(self.tp_size)]
        body = {
            "serialized_named_tensors": [base64.b64encode(p).decode() for p in packed],
            "load_format": load_format,
            "flush_cache": flush_cache,
        }
        answer = httpx.post(f"http://{self.address}/update_weights_from_tensor", json=body, timeout=60).json()
        return answer["success"], answer["message"]
