"""The adapter that makes this a rollout weight-sync backend of verl 0.9.1, turned on by configuration alone:

    actor_rollout_ref.rollout.checkpoint_engine.backend=reshard
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=sglang_reshard.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.reshard.transport=auto      # see `settings`

Colocated (a hybrid engine) and disaggregated (standalone replicas) alike. verl imports this module, for that
setting, in every actor worker, every rollout worker and in the driver; what is hooked into verl there:

    checkpoint_engine.py  `ReshardCheckpointEngine`, in verl's registry under the name "reshard"
    weights.py            training engines' `get_per_tensor_param`: what it hands out remembers its engine
    server_adapter.py     SGLang's `ServerAdapter.update_weights`: takes the shards instead of gathered tensors
    driver.py             `CheckpointEngineManager.update_weights`, `Tracking.log`: metrics of a colocated sync

verl lets an engine class or a rollout class be registered instead. It chooses them before it imports this
module, and takes its own in silence if ours come too late; hooks on the classes it has chosen cannot be missed.
"""

from __future__ import annotations

from sglang_reshard.verl import checkpoint_engine, driver

__all__ = ["checkpoint_engine"]

driver.install()
