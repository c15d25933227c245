"""Reads parameters that DeepSpeed's ZeRO-3 has partitioned: this rank's piece, `ds_tensor`, in place.

ZeRO-3 flattens each parameter and gives every rank of its process group an equal range, the last ones padded. The
parameter itself is empty, or a gathered copy for as long as a module runs: small ones (`ds_persist`) and hpZ's
secondary partitions are such copies, too, and are left alone. ZeRO-1 and 2 leave parameters whole on every rank, so
they are read as any others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources.flat import FlatBuffer, FlatMember


def partition(where: str, name: str, parameter: Any) -> tuple[torch.Tensor, FlatBuffer]:
    """Returns this rank's piece of a partitioned parameter and its flat buffer, with one member of this name.

    Raises Unsupported, starting with `where`, for a piece that is on NVMe, or quantized.
    """
    piece = parameter.ds_tensor
    if piece.status.name != "AVAILABLE":
        raise Unsupported(
            f"{where} is partitioned by ZeRO-3 and its piece is not in memory (offload_param to NVMe). Offload "
            "parameters to the CPU, or do not offload them"
        )
    if hasattr(piece, "ds_quant_scale"):
        raise Unsupported(f"{where} is quantized by ZeRO-3; unset zero_quantized_nontrainable_weights")
    size, total = int(piece.ds_numel), int(parameter.ds_numel)
    ranges = tuple(
        (rank, min(number * size, total), min((number + 1) * size, total))
        for number, rank in enumerate(dist.get_process_group_ranks(parameter.ds_process_group))
    )
    return piece, FlatBuffer((FlatMember(name, tuple(parameter.ds_shape), 0),), ranges)
