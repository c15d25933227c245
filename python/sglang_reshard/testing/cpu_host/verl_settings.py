"""Returns the environment variables and hydra overrides that verl needs on a host without a GPU.

subprocess.run(
    [sys.executable, "-m", "verl.trainer.main_ppo", *verl_settings.overrides(), ...],
    env={**os.environ, **verl_settings.environment(tp_size=2)},
)
"""

from __future__ import annotations

import os

from sglang_reshard.testing import cpu_host
from sglang_reshard.testing.cpu_host import engine_arguments, refuse_gpu

PLATFORM_MODULE = "sglang_reshard.testing.cpu_host.verl_platform"


def environment(tp_size: int) -> dict[str, str]:
    """Returns the variables that verl's driver and its Ray workers need, with rollout engines of `tp_size` ranks.

    Set them before the driver starts: Ray's daemons pass their own environment on to workers. CUDA_VISIBLE_DEVICES must
    not be set. Raises GpuHost on a host with a usable GPU.
    """
    refuse_gpu("verl_settings", "verl runs here without these settings.")
    others = [m for m in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if m and m != PLATFORM_MODULE]
    return {
        **cpu_host.environment(tp_size),
        "VERL_USE_EXTERNAL_MODULES": ",".join([PLATFORM_MODULE, *others]),
        "VERL_PLATFORM": "cpu",
        # verl registers its FSDP engine for cuda and npu only; this variable of verl's selects one of them.
        "VERL_ENGINE_DEVICE": "cuda",
        # Otherwise Ray starts a worker per CPU at once, and num_cpus has to be larger than the number of CPUs.
        "RAY_prestart_worker_first_driver": "0",
    }


def overrides() -> list[str]:
    """Returns the hydra overrides that verl.trainer.main_ppo needs on a CPU host, for any model."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    engine_kwargs = engine_arguments(enable_memory_saver=False)
    return [
        "trainer.device=cpu",
        "ray_kwargs.ray_init.num_cpus=32",  # verl reserves several per worker, and waits silently for more
        "actor_rollout_ref.model.use_remove_padding=False",  # needs flash attention
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.ref.strategy=fsdp2",
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile=False",
        f"{rollout}.enforce_eager=True",
        *(f"+{rollout}.engine_kwargs.sglang.{name}={value}" for name, value in engine_kwargs.items()),
    ]
