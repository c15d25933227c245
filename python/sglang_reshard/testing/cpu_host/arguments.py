"""Returns the ServerArgs of an engine on a CPU host."""

from __future__ import annotations

from typing import Any


def engine_arguments(**overrides: Any) -> dict[str, Any]:
    """Returns keyword arguments for `sglang.Engine` or `VerlEngine` on a CPU host, updated with `overrides`."""
    arguments: dict[str, Any] = {
        "device": "cpu",
        # The default on an x86 CPU is intel_amx, which only SGLang's AMX build has.
        "attention_backend": "torch_native",
        # Size of the KV cache in tokens. Without it each rank allocates its fraction of the whole host.
        "max_total_tokens": 2048,
        # A limit that max_total_tokens stays far below. It is high because the ranks load at the same time: with a low
        # one, the memory that the other ranks allocate meanwhile looks like too large a model.
        "mem_fraction_static": 0.9,
        # Without it idle ranks poll all the time, and keep the cores from the trainer and from each other.
        "sleep_on_idle": True,
        # GPU features. Without these lines 0.5.12 starts, too, but tries them first and warns.
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "disable_custom_all_reduce": True,
    }
    return arguments | overrides


def command_line() -> list[str]:
    """Returns `engine_arguments` as options of `sglang serve` and `python -m sglang.launch_server`."""
    options = []
    for name, value in engine_arguments().items():
        options += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return options
