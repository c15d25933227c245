"""The route delta, around p2p or nixl: trainer ranks offer what has changed instead of all weights."""

from sglang_reshard.routes.delta.engine import DeltaEngineEnd as engine_end
from sglang_reshard.routes.delta.trainer import DeltaTrainerEnd as trainer_end

__all__ = ["engine_end", "trainer_end"]
