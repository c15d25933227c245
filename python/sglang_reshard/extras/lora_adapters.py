"""Updates any number of LoRA adapters that one engine serves, all or none, in one update.

adapters = sender.lora_adapters()                                  # collective; also a method of VerlEngine
adapters.update({"math": Adapter(math_config, math_tensors), "code": Adapter(code_config, code_tensors)})
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sglang_reshard.errors import ReshardError
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.messages import LoraAdapter
from sglang_reshard.sources import NamedTensors, as_list
from sglang_reshard.sources.flat import FlatBuffer, FlatMember
from sglang_reshard.sources.fused import FusedTensor
from sglang_reshard.trainer.coordinator import Send
from sglang_reshard.trainer.options import UpdateOptions
from sglang_reshard.trainer.update_sender import UpdateSender

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sglang_reshard.api.given import UpdateGiven


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter of an update.

    config   see `sources.adapter_config`
    tensors  this rank's, as `sources.adapter_tensors` or `sources.megatron_adapter_tensors` returns them
    version  of these weights, see `WeightsInfo.adapters`; by default the update's weight_version
    """

    config: str
    tensors: NamedTensors | torch.nn.Module
    version: str = ""


class LoraAdapters(UpdateSender):
    """One trainer rank's end of a session for the LoRA adapters of one engine, see `WeightSender.lora_adapters`."""

    def __init__(self, send: Send | None, *arguments: Any) -> None:
        """`arguments` are those of `UpdateSender`."""
        super().__init__(*arguments)
        self.set_engines({0: send})

    def update(
        self, adapters: Mapping[str, Adapter], options: UpdateOptions | None = None, **given: Unpack[UpdateGiven]
    ) -> UpdateReport:
        """Updates these adapters, all or none, and leaves others as they are. Collective: all ranks pass the same ones.

        adapters        name, which requests select it by as `lora_path`, -> adapter; the engine need not have it yet
        options, given  see `UpdateOptions`

        Raises what `WeightSender.update` raises. An error about one adapter names it, and no adapter has changed.
        After TornWeights the engine refuses requests for all adapters of the update until an update of them succeeds.
        """
        lora = tuple(LoraAdapter(name, adapters[name].config, adapters[name].version) for name in sorted(adapters))
        chosen = replace(UpdateOptions.of(options, given), lora=lora)
        (outcome,) = self.update_engines(_rows(adapters, self._rank), chosen).values()
        if isinstance(outcome, ReshardError):
            raise outcome
        return outcome


def _rows(adapters: Mapping[str, Adapter], trainer_rank: int) -> Iterator[tuple[Any, ...]]:
    """Yields the tensors of all adapters under their names in the update, see `LoraAdapter`."""
    for adapter in sorted(adapters):
        for name, tensor, *sharding in as_list(adapters[adapter].tensors, trainer_rank):
            yield f"{adapter}/{name}", tensor, *(_within(f"{adapter}/", one) for one in sharding)


def _within(prefix: str, sharding: Any) -> Any:
    """Returns a sharding with the prefix before the names that it lists."""
    lists = {FusedTensor: "slices", FlatBuffer: "members"}.get(type(sharding))
    return replace(sharding, **{lists: _named(prefix, getattr(sharding, lists))}) if lists else sharding


@functools.lru_cache(maxsize=1 << 14)
def _named(prefix: str, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    if parts and isinstance(parts[0], FlatMember):
        return tuple(replace(m, name=prefix + m.name, slices=_named(prefix, m.slices)) for m in parts)
    return tuple((prefix + name, box) for name, box in parts)
