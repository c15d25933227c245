"""Makes this package a rollout weight-sync backend of verl 0.9.1, enabled by configuration alone:

    actor_rollout_ref.rollout.checkpoint_engine.backend=reshard
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=sglang_reshard.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.reshard.transport=auto      # see `settings`

For colocated (hybrid engine) and disaggregated (standalone) replicas alike. With this setting verl imports this module
in every actor worker, every rollout worker and the driver, where it hooks into verl:

    checkpoint_engine.py  `ReshardCheckpointEngine`, in verl's registry under the name "reshard"
    training_engine_weights.py     training engines' `get_per_tensor_param`: its result refers to the engine
    server_adapter.py     SGLang's `ServerAdapter.update_weights`: receives the shards instead of gathered tensors
    driver_hooks.py       `CheckpointEngineManager`'s `update_weights`, `build_process_group` and `add_replicas`, and
                          `Tracking.log`
    rollout_difference.py `calculate_debug_metrics`, to which it adds metrics

Every other version of verl is refused here, by name (verl_version.py).

verl also allows registering an engine class or a rollout class. But it chooses them before it imports this module, and
silently uses its own if a registration comes too late; hooks on the chosen classes always apply.
"""

from __future__ import annotations

import verl

from sglang_reshard.verl import verl_version

verl_version.check(verl.__version__)

from sglang_reshard.verl import checkpoint_engine, driver_hooks  # noqa: E402  (another verl lacks what these import)

__all__ = ["checkpoint_engine"]

driver_hooks.install()
