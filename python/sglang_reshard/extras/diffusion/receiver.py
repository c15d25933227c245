"""Receives updates of a diffusion transformer, on each rank of SGLang's diffusion engine.

    receiver = TransformerReceiver(pipeline.get_module("transformer"))    # in each worker process
    receiver.init(metadata)                                               # of the trainer's ModuleSender
    receiver.poll_and_apply()                                             # between two requests

Every rank is a separate receiver, and gets its part only.
"""

from __future__ import annotations

from torch import nn

from sglang_reshard.extras.diffusion.transformer import DiffusionTransformer
from sglang_reshard.extras.modules.receiver import ModuleReceiver


class TransformerReceiver(ModuleReceiver):
    """One rank's end. Names of weights are those of the transformer's checkpoint, as diffusers has it."""

    def _with_loader(self, model: nn.Module, strict: bool) -> DiffusionTransformer:
        return DiffusionTransformer(model, strict=strict)
