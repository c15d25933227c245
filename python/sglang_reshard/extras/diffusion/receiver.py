"""Receives updates of a diffusion transformer, on each rank of SGLang's diffusion engine.

    receiver = TransformerReceiver(pipeline.get_module("transformer"))    # in each worker process
    receiver.init(metadata)                                               # of the trainer's ModuleSender
    receiver.poll_and_apply()                                             # between two requests

Every rank is a separate receiver, and gets its part only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.extras.modules.receiver import ModuleReceiver, StateDictModel

_MAKES_NOTHING = "BaseDiT"  # its `post_load_weights` is empty
_UNQUANTIZED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


class TransformerReceiver(ModuleReceiver):
    """One rank's end. Names of weights are those of the transformer's checkpoint, as diffusers has it."""

    def _with_loader(self, model: nn.Module, strict: bool) -> DiffusionTransformer:
        return DiffusionTransformer(model, strict=strict)


class DiffusionTransformer(StateDictModel):
    """A transformer (DiT) of a diffusion pipeline. Names of weights are those of its checkpoint, as diffusers has it.

    SGLang fills some parameters that a checkpoint lacks with zeros or ones. Here they keep their values, if the trainer
    allows it, or the update is refused.
    """

    def __init__(self, module: nn.Module, *, strict: bool) -> None:
        super().__init__(module, strict=strict)
        self._built = _built_parameters(module)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads this rank's part of each weight. Raises Mismatch and Unsupported as `StateDictModel`."""
        from sglang.multimodal_gen.runtime.loader.fsdp_load import load_model_from_full_model_state_dict
        from sglang.multimodal_gen.runtime.loader.utils import get_param_names_mapping

        if reason := refusal(self.module):
            raise Unsupported(reason)
        live = _Live(self.module, self._built)
        load_model_from_full_model_state_dict(
            live,
            iter(weights),
            next(self.module.parameters()).device,
            None,
            param_names_mapping=get_param_names_mapping(self.module.param_names_mapping),
        )
        self.loads.written = [(name, live.tensors[name]) for name in live.written]
        written = {name for name, _ in self.loads.written}
        missing = [name for name in self.module.state_dict() if name not in written and not self.loads.may_stay(name)]
        if missing and not self.keeps_unsent:
            raise Mismatch(
                f"the transformer has {missing[0]}, which no tensor of the update reaches ({len(missing)} in all). "
                "Send all tensors of its checkpoint, under the names of diffusers, or name it in frozen="
            )


def _built_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that a transformer was built with, without memory: those of a start lack the loaders."""
    from sglang.multimodal_gen.configs.models.dits.base import DiTConfig

    config: Any = module.config  # some models keep the inner part only
    if not isinstance(config, DiTConfig):
        config = DiTConfig(arch_config=config)
    with torch.device("meta"):
        twin = type(module)(config=config, hf_config=module.hf_config, quant_config=None)
    return dict(twin.named_parameters())


class _Live:
    """Stands in for a module while SGLang's own function loads it, and copies what it is given into live parameters.

    That function shards and renames a checkpoint, then replaces the module's parameters.
    """

    def __init__(self, module: nn.Module, built: dict[str, nn.Parameter]) -> None:
        self.tensors: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
        self._parameters = built
        self.written: list[str] = []
        self.reverse_param_names_mapping: dict[str, Any] = {}  # set by SGLang: what the checkpoint has

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.tensors)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._parameters.items()

    def load_state_dict(self, loaded: Mapping[str, torch.Tensor], **_: Any) -> None:
        for name, tensor in loaded.items():
            if name not in self.reverse_param_names_mapping:
                continue  # SGLang's filling
            live = self.tensors[name]
            if live.shape != tensor.shape:  # `copy_` would broadcast
                raise Mismatch(
                    f"{name} is loaded with shape {list(tensor.shape)}, but the transformer's has {list(live.shape)}"
                )
            live.data.copy_(tensor)
            self.written.append(name)


def refusal(module: nn.Module) -> str:
    """Returns why the parameters of a loaded transformer are not those that its loader writes; empty if they are."""
    if any(manager.enabled for manager in getattr(module, "layerwise_offload_managers", ())):
        return "the transformer's layers are offloaded one by one. Start the engine without dit_layerwise_offload"
    sharded = next((name for name, p in module.named_parameters() if isinstance(p, DTensor)), None)
    if sharded is not None:
        return f"{sharded} is a DTensor. Start the engine without use_fsdp_inference"
    for name, part in module.named_modules():
        method = getattr(part, "quant_method", None)
        if method is not None and type(method).__name__ not in _UNQUANTIZED:
            return (
                f"{name} has the quantization method {type(method).__name__}. Load the transformer without quantization"
            )
    makes = next((kind for kind in type(module).__mro__ if "post_load_weights" in vars(kind)), None)
    if makes is not None and makes.__name__ != _MAKES_NOTHING:
        return f"{makes.__name__} computes tensors from its weights after loading, which is not supported yet"
    return ""
