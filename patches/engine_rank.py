"""The engine rank of a process: its number among all data parallel, pipeline and tensor parallel ranks of its engine.

    rank = (data parallel rank * pipeline stages + stage) * tensor parallel size + tensor parallel rank

With dp-attention the data parallel ranks are tensor parallel ranks too, and count once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from sglang_reshard.patches import sglang_versions

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def engine_rank(runner: ModelRunner) -> tuple[int, int]:
    """Returns this engine rank, and the number of engine ranks."""
    # SGLang's world is one data parallel rank's.
    arguments, rank, size = runner.server_args, dist.get_rank(), dist.get_world_size()
    if arguments.dp_size == 1 or arguments.enable_dp_attention:
        return rank, size
    return sglang_versions.data_parallel_rank(runner) * size + rank, arguments.dp_size * size
