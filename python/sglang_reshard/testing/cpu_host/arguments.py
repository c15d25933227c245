"""The ServerArgs of an engine on a CPU host."""

from __future__ import annotations

from typing import Any


def engine_arguments(**overrides: Any) -> dict[str, Any]:
    """Keyword arguments for `sglang.Engine` or `VerlEngine` on a CPU host; `overrides` win."""
    arguments: dict[str, Any] = {
        "device": "cpu",
        # The default on an x86 CPU is intel_amx, which is in SGLang's AMX build only.
        "attention_backend": "torch_native",
        # The KV cache in tokens. Without it each rank takes its fraction of the whole host.
        "max_total_tokens": 2048,
        # A ceiling that the line above keeps far from. It is high because the ranks load at the same time:
        # with a low one, the memory that the other ranks took meanwhile looks like too large a model.
        "mem_fraction_static": 0.9,
        # Without it idle ranks poll all the time, and take the cores from the trainer and from each other.
        "sleep_on_idle": True,
        # Features of GPUs. 0.5.12 starts without these lines, and tries and warns on the way.
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "disable_custom_all_reduce": True,
    }
    return arguments | overrides


def command_line() -> list[str]:
    """`engine_arguments` as options of `sglang serve` and `python -m sglang.launch_server`."""
    options = []
    for name, value in engine_arguments().items():
        options += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return options
