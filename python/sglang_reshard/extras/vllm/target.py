"""The model of a vLLM worker as a target: vLLM's own `load_weights`, traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.layout.names import matches_any
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.program import MayStay, Program

# Buffers of vLLM's attention layers. Its loaders take them by name, and unquantized checkpoints do not have them.
_SCALES = ("*._q_scale", "*._k_scale", "*._v_scale", "*._prob_scale")


class VLLMModel(TracedModel):
    """A model of vLLM's, whose attention scales keep their values unless the trainer sends them."""

    def program(self, specs: Sequence[TensorSpec], may_stay: MayStay) -> Program:
        program = super().program(specs, replace(may_stay, frozen=(*may_stay.frozen, *_SCALES)))
        # The report lists what the trainer allowed to stay.
        kept = tuple(name for name in program.kept if may_stay(name) or not matches_any(name, _SCALES))
        return replace(program, kept=kept)
