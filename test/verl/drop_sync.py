"""Makes verl lose an update: after step 2, weights reach no engine. To be named as `model.external_lib`.

The rest of verl's update goes on, so that the engine's memory comes back.
"""

from __future__ import annotations

from typing import Any

from verl.workers.engine_workers import ActorRolloutRefWorker

LOST_STEP = 2
_original = ActorRolloutRefWorker.update_weights


async def update_weights(self: Any, global_steps: int | None = None, mode: str = "auto") -> Any:
    if global_steps == LOST_STEP:
        self.rollout.update_weights = _do_nothing
    try:
        return await _original(self, global_steps=global_steps, mode=mode)
    finally:
        vars(self.rollout).pop("update_weights", None)


async def _do_nothing(*_: Any, **__: Any) -> None:
    print(f"the update after step {LOST_STEP} is lost")


vars(update_weights).update(vars(_original))  # verl's marks, by which it knows how to call the method
ActorRolloutRefWorker.update_weights = update_weights
