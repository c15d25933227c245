"""verl's SGLang replicas in a test's job: asked for tokens, and for digests of all they hold."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import ray

from sglang_reshard.selftest.digests import read_live_digests
from tools.oracle.http_engine import HttpEngine


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
        """Of all live tensors, by engine rank. The server has to allow `sglang_reshard.selftest.digests.LOADER`."""
        return read_live_digests(HttpEngine(self.replica.server_address, self.tp_size), folder)
