"""The architectures to try: SGLang's own registry of models that generate, and whose checkpoints they load.

transformers writes the checkpoints, so an architecture needs a class there: one of its own name; or that of an
architecture which its SGLang class inherits from; or one for the config that its SGLang class says it takes; or, for
SGLang's wrapper of models that it has no class for, such a model. Where a published checkpoint is otherwise than what
any of them writes, support/checkpoints/published_*.py say how.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import transformers

from support.checkpoints import PUBLISHED, has_experts

# By these the wrapper finds how many experts there are.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A name in SGLang's registry, and the transformers class that writes its checkpoint (None: there is none).

    multimodal  it reads images or sound
    """

    name: str
    writer: str | None
    multimodal: bool = False

    @property
    def has_blocks(self) -> bool:
        """Whether its tensors can be of whole blocks: some of those of a relative's have sizes of their own."""
        return self.kind == "text" and (self.name not in PUBLISHED or PUBLISHED[self.name].writer is None)

    @property
    def kind(self) -> str:
        return "draft" if self.is_draft else "multimodal" if self.multimodal else "text"

    @property
    def is_draft(self) -> bool:
        """Whether it is built and loaded with a target, by whose name its checkpoint goes."""
        return self.name in PUBLISHED and PUBLISHED[self.name].draft is not None

    @property
    def own(self) -> bool:
        """Whether the checkpoint is that of the architecture itself, not of a relative."""
        return self.writer is not None and _spelling(self.name) == _spelling(self.writer)


def generation() -> list[Architecture]:
    """All that generate, by SGLang's own predicates. Imports SGLang: choose_code_paths comes first."""
    from sglang.srt.configs.model_config import is_generation_model, is_multimodal_model
    from sglang.srt.models.registry import ModelRegistry

    names = sorted(n for n in ModelRegistry.get_supported_archs() if is_generation_model([n]))
    return [Architecture(n, _writer(n, ModelRegistry.models[n]), is_multimodal_model([n])) for n in names]


def _writer(name: str, implementation: type) -> str | None:
    if name in PUBLISHED and PUBLISHED[name].writer:
        return PUBLISHED[name].writer
    relatives = (_by_spelling().get(_spelling(n)) for n in (name, *(c.__name__ for c in implementation.__mro__)))
    found = next(filter(None, relatives), None)
    if found is None:
        config = inspect.signature(implementation).parameters.get("config")
        found = dict(_language_models()).get(getattr(getattr(config, "annotation", None), "model_type", ""))
    return found or _wrapped(implementation)


@cache  # transformers takes a tenth of a second to list its names
def _by_spelling() -> dict[str, str]:
    """Classes of transformers by the spelling of their names."""
    of_images = {_spelling(n): n for n in dir(transformers) if n.endswith("ForConditionalGeneration")}
    return of_images | {_spelling(n): n for _, n in _language_models()}


def _wrapped(implementation: type) -> str | None:
    """The first model that SGLang has no class for, and that its wrapper can distribute."""
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.models.transformers import MoEMixin, MultiModalMixin, TransformersBase
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not issubclass(implementation, TransformersBase):
        return None
    known = set(map(_spelling, ModelRegistry.models))
    of_images = issubclass(implementation, MultiModalMixin)
    for model_type, name in sorted(_models_of_images() if of_images else _language_models(), key=lambda pair: pair[1]):
        if _spelling(name) in known:
            continue
        whole = CONFIG_MAPPING[model_type]()
        config: Any = getattr(whole, "text_config", None) if of_images else whole
        if config is None or not config.base_model_tp_plan:
            continue
        experts = has_experts(config.to_dict())
        counted = not experts or any(hasattr(config, key) for key in _EXPERTS)
        if counted and experts == issubclass(implementation, MoEMixin):
            return name
    return None


@cache
def _language_models() -> tuple[tuple[str, str], ...]:
    """Model type and class, as transformers' own mapping has them for causal language models."""
    from transformers.models.auto import modeling_auto as auto

    return _pairs(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@cache
def _models_of_images() -> tuple[tuple[str, str], ...]:
    from transformers.models.auto import modeling_auto as auto

    return _pairs(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def _pairs(mapping: Mapping[str, str | Sequence[str]]) -> tuple[tuple[str, str], ...]:
    found = ((kind, [names] if isinstance(names, str) else names) for kind, names in mapping.items())
    return tuple((kind, name) for kind, names in found for name in names)


def _spelling(name: str) -> str:
    """PhiMoE and Phimoe, Ernie4_5_ and Ernie4_5 are two spellings of one name."""
    return re.sub("[^a-z0-9]", "", name.lower())
