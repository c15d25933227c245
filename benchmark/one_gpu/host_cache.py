"""A trainer rank of the case of a prefix cache in host memory: `torchrun -m benchmark.one_gpu.host_cache JOB`.

SGLang's hierarchical cache keeps there what its pool on the GPU has no room for. After an update with
flush_cache="by_version" nobody may read what old weights have computed, in neither of them.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import msgspec

from benchmark import stock
from benchmark.one_gpu.rank import ON_GPU
from benchmark.paths import ReshardPath
from benchmark.trainer import Job, engine_and_weights, join
from tools.oracle.digests import LOADER

PROMPTS, PROMPT_TOKENS, POOL_TOKENS = 16, 200, 1024
FEW_PROMPTS = 3  # of a rehearsal, whose engine has no cache in host memory
HIERARCHICAL = {
    **ON_GPU,
    "enable_memory_saver": False,
    "max_total_tokens": POOL_TOKENS,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 8.0,
}


def main(job: Job) -> None:
    join(job.device, 1)
    stock.prepare()
    rows: list[dict[str, Any]] = []
    with engine_and_weights(job, LOADER, **HIERARCHICAL) as (engine, weights):
        for number, flush_cache in enumerate(("by_version", False)):
            path = ReshardPath(engine, "auto", flush_cache=flush_cache)
            weights.become(2 * number + 1)
            path.update(weights.named())
            engine.flush_cache()
            prompts = _prompts(number)[: FEW_PROMPTS if job.device == "cpu" else None]
            for prompt in prompts:
                _cached(engine, prompt)
            before = _cached(engine, prompts[0])  # the GPU's pool holds the last prompts
            weights.become(2 * number + 2)
            path.update(weights.named())
            after = _cached(engine, prompts[1])
            again = _cached(engine, prompts[1])
            # The other way reads what old weights have computed: it shows that there was something to read.
            right = before["all"] > 0 and again["all"] > 0 and (after["all"] > 0) == (flush_cache is False)
            right &= before["host"] > 0 or job.device == "cpu"
            step = f"cache in host memory, flush_cache={flush_cache!r}"
            seen = {"before_the_update": before, "after_the_update": after, "then": again}
            rows.append({"case": job.case.kind, "step": step, "right": right, **seen})
            (Path(job.folder) / "seen.json").write_bytes(msgspec.json.encode(rows))
            path.close()


def _prompts(seed: int) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(5, 500) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def _cached(engine: Any, prompt: list[int]) -> dict[str, int]:
    """Asks for an answer. Returns how many tokens of the prompt were in the cache, and in host memory."""
    said = engine.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 4})["meta_info"]
    return {"all": said["cached_tokens"], "host": (said.get("cached_tokens_details") or {}).get("host", 0)}


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Job))
