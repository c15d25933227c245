"""What to set for verl on a host without a GPU: environment variables and hydra overrides.

subprocess.run(
    [sys.executable, "-m", "verl.trainer.main_ppo", *verl_settings.overrides(), ...],
    env={**os.environ, **verl_settings.environment(tp_size=2)},
)
"""

from __future__ import annotations

import os
from typing import Any

from sglang_reshard.testing.cpu_host.arguments import engine_arguments
from sglang_reshard.testing.cpu_host.host import environment as sglang_environment
from sglang_reshard.testing.cpu_host.host import refuse_gpu

PLATFORM_MODULE = "sglang_reshard.testing.cpu_host.verl_platform"


def environment(tp_size: int) -> dict[str, str]:
    """All variables that a driver of verl and its Ray workers need, with rollout engines of `tp_size` ranks.

    To be set before the driver starts: Ray's daemons hand on to workers what they were started with.
    CUDA_VISIBLE_DEVICES must not be set. Raises GpuHost on a host with a usable GPU.
    """
    refuse_gpu("verl_settings", "verl runs here as it is, without these settings.")
    others = [m for m in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if m and m != PLATFORM_MODULE]
    return {
        **sglang_environment(tp_size),
        "VERL_USE_EXTERNAL_MODULES": ",".join([PLATFORM_MODULE, *others]),
        "VERL_PLATFORM": "cpu",
        # verl registers its FSDP engine for cuda and npu only; this is its own way to say which to take.
        "VERL_ENGINE_DEVICE": "cuda",
        # Ray would start a worker for each CPU at once, and it has to be told of more CPUs than there are.
        "RAY_prestart_worker_first_driver": "0",
    }


def rollout_engine_arguments(**overrides: Any) -> dict[str, Any]:
    """`rollout.engine_kwargs.sglang` of an engine on a CPU host; `overrides` win."""
    return engine_arguments(enable_memory_saver=False, **overrides)


def overrides(*, num_cpus: int = 32) -> list[str]:
    """The hydra overrides that verl.trainer.main_ppo needs on a CPU host, whatever is trained.

    num_cpus  what Ray is told; verl reserves several for each worker, and waits in silence if there are too few
    """
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        "trainer.device=cpu",
        f"ray_kwargs.ray_init.num_cpus={num_cpus}",
        "actor_rollout_ref.model.use_remove_padding=False",  # wants flash attention
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.ref.strategy=fsdp2",
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile=False",
        f"{rollout}.enforce_eager=True",
        *(f"+{rollout}.engine_kwargs.sglang.{name}={value}" for name, value in rollout_engine_arguments().items()),
    ]
