"""Parameters broadcast one by one, by modules and in buckets: `python -m benchmark.parameter_stream`.

A trainer broadcasts a whole model over gloo to one process beside an engine, which takes it by `ParameterStream`; two
processes stand in for engine ranks. Seconds are medians of the versions after the first, which plans.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmark import matrices, pages
from benchmark.matrices import Matrices, MatrixParts
from benchmark.results import Rows
from benchmark.world import run_world, updates
from sglang_reshard.selftest.children import free_port

MODELS = (matrices.DENSE, matrices.MOE)
WAYS: tuple[tuple[str, int, bool], ...] = (
    ("one by one", 0, False),
    ("by modules", 64 << 20, True),
    ("buckets of 1 MiB", 1 << 20, False),
    ("buckets of 64 MiB", 64 << 20, False),
)
VERSIONS, ENGINES, DEADLINE_S = 6, 2, 500.0


def train(trainer: Any, model: Matrices, port: int) -> list[dict[str, Any]]:
    """Trainer rank 1 broadcasts; trainer rank 0, which reaches the engine ranks, is beside them."""
    from sglang.srt.utils.common import init_custom_process_group

    from sglang_reshard.extras.parameter_stream import ParameterStream, buckets, packed

    at: dict[str, Any] = {"world_size": 2, "group_name": "weights", "backend": "gloo"}
    beside = trainer.rank == 0
    if beside:
        stream = ParameterStream(trainer.send, timeout_s=100)
        stream.init_broadcast_group("127.0.0.1", port, rank_offset=1, **at)
    else:
        group = init_custom_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=0, **at)
    weights = [(name, torch.empty(model.rows, model.columns, dtype=torch.bfloat16)) for name in model.names]
    found = []
    version = 0
    for way, bucket_bytes, by_module in WAYS:
        streamed, committed = [], []
        cut = list(buckets(weights, bucket_bytes, by_module=by_module))
        for _ in range(VERSIONS):
            version += 1
            for number, (_, tensor) in enumerate(weights):
                tensor.fill_(matrices.value(number, version))
            dist.barrier()
            began = time.perf_counter()
            for bucket in cut:
                if beside:
                    names, tensors = zip(*bucket, strict=True)
                    dtypes, shapes = [t.dtype for t in tensors], [t.shape for t in tensors]
                    stream.update_broadcast_bucket(version, names, dtypes, shapes)
                else:
                    dist.broadcast(packed(bucket), 0, group)
            streamed.append(time.perf_counter() - began)
            if beside:
                began = time.perf_counter()
                stream.commit(version)
                committed.append(time.perf_counter() - began)
        if beside:
            stream_s, commit_s = (statistics.median(took[1:]) for took in (streamed, committed))
            seconds = {"stream_seconds": stream_s, "commit_seconds": commit_s}
            found.append({"way": way, "broadcasts": len(cut), **seconds})
    if beside:
        stream.close()
    return found


def serve(rank: int, ranks: int, requests: Any, model: Matrices, _port: int) -> bool:
    """Whether all weights are right after every update."""
    engine, exact = MatrixParts(rank, ranks, model), True
    for request in updates(engine, rank, ranks, requests):
        version = int(request.weight_version)
        exact &= all((p == matrices.value(n, version)).all() for n, p in enumerate(engine.weights))
    return exact


def run(model: Matrices) -> Rows:
    """A row for each way. stream_seconds: until all have arrived; commit_seconds: of the update after it."""
    arguments = (model, free_port())
    (told, _), exact = run_world("benchmark.parameter_stream", 2, ENGINES, *arguments, deadline_s=DEADLINE_S)
    of_model = {"model": model.name, "tensors": model.tensors, "bytes": model.nbytes}
    return [{**of_model, **way, "bit_exact": all(exact)} for way in told]


def main() -> int:
    rows = [row for model in MODELS for row in run(model)]
    pages.publish("parameter-stream", "python -m benchmark.parameter_stream", rows)
    return 0 if all(row["bit_exact"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
