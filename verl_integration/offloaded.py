"""Finds the values of Megatron's parameters while verl has offloaded them (`megatron.param_offload`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class OffloadedParameters:
    """The host copies that verl keeps of Megatron's flat buffers of parameters.

    Parameters are views of a flat buffer. verl offloads it by freeing the buffer's storage, which leaves the parameters
    on the GPU without memory, and keeps the values as its attribute `cpu_data`, in pinned memory.
    """

    def __init__(self, chunks: Iterable[Any]) -> None:
        """`chunks` are the model's, wrapped by Megatron's DDP or not."""
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the id of the buffer's storage
        for chunk in chunks:
            for name in ("buffers", "expert_parallel_buffers"):
                buffers = getattr(chunk, name, None)
                for buffer in buffers if isinstance(buffers, list) else ():
                    copy = getattr(buffer.param_data, "cpu_data", None)
                    if copy is not None:
                        self._copies[_storage_id(buffer.param_data)] = buffer.param_data, copy

    def values(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns a parameter's data, or the same view of the host copy if its memory was freed.

        Returns the data without memory if no copy is known to have the same elements at the same places.
        """
        data = parameter.data
        flat, copy = self._copies.get(_storage_id(data), (None, None))
        if data.numel() == 0 or data.untyped_storage().nbytes() or flat is None or copy is None:
            return data
        start = int(data.storage_offset()) - int(flat.storage_offset())
        last = start + sum((n - 1) * stride for n, stride in zip(data.shape, data.stride(), strict=True))
        alike = copy.shape == flat.shape and copy.dtype == flat.dtype == data.dtype
        if not (alike and flat.is_contiguous() and copy.is_contiguous() and 0 <= start <= last < flat.numel()):
            return data
        return copy.as_strided(data.size(), data.stride(), int(copy.storage_offset()) + start)


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # an emptied storage has no address
