"""Digests of everything that a model reaches: its oracle compares an updated engine with a fresh one."""

from __future__ import annotations

import torch

from sglang_reshard.derived.reachable import numbers_in, tables, tensors_in
from sglang_reshard.selftest.digests import digest


def reachable_state(model: torch.nn.Module) -> dict[str, str]:
    """Returns digests of all tensors and numbers that are reachable from `model`, by kind of place and path."""
    found: dict[str, str] = {}
    for table in tables(model):
        for key, value in table.items():
            path = f"{table.kind} {table.name(key)}"
            for number, tensor in enumerate(tensors_in(value)):
                if tensor.device.type != "meta" and tensor.layout is torch.strided and tensor.numel():
                    found[f"{path}/{number}"] = digest(tensor)
            whole = [value] if type(value) is int else []
            if numbers := [repr(number) for number in (*whole, *numbers_in(value))]:
                found[path] = " ".join(numbers)
    return found
