"""Tags the generator that verl's `get_per_tensor_param` returns with its training engine.

Shards can then be read from the engine instead of the gathered tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sglang_reshard.errors import Unsupported
from sglang_reshard.verl import fsdp
from sglang_reshard.verl.hooks import around


class TrainingEngineWeights:
    """verl's generator of gathered tensors, unchanged, and the `engine` that it is of. Iterating it gathers."""

    def __init__(self, engine: Any, gathered: Iterator[Any]) -> None:
        self.engine = engine
        self._gathered = gathered

    def __iter__(self) -> Iterator[Any]:
        return iter(self._gathered)

    def __next__(self) -> Any:
        return next(self._gathered)


def engine_of(weights: Any) -> Any:
    """Returns the training engine of `weights`. Raises Unsupported if they do not refer to it."""
    if not isinstance(weights, TrainingEngineWeights):
        raise Unsupported(
            f"verl passed weights as a {type(weights).__name__}, which gathers them. The training engine's class was "
            "probably registered after this worker imported sglang_reshard.verl. Import it earlier "
            "(model.external_lib)"
        )
    return weights.engine


def install() -> None:
    """Makes every training engine of verl return `TrainingEngineWeights`.

    Nothing is moved to the GPU and nothing gathered until one iterates.
    """
    from verl.workers.engine.base import BaseEngine, EngineRegistry

    registered = [
        engine
        for backends in EngineRegistry._engines.values()
        for devices in backends.values()
        for engine in devices.values()
    ]
    for engine in registered:
        for owner in engine.__mro__:
            if owner is not BaseEngine and "get_per_tensor_param" in vars(owner):
                around(owner, "get_per_tensor_param", _get_per_tensor_param)


def _get_per_tensor_param(stock: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    if not serves_adapters(engine):
        return TrainingEngineWeights(engine, _gathered(stock, engine, *args, **kwargs)), None
    if fsdp.is_fsdp(engine):  # the adapters are described by the second result
        return TrainingEngineWeights(engine, _gathered(stock, engine, *args, **kwargs)), fsdp.peft_config(engine)
    weights, peft_config = stock(engine, *args, **kwargs)
    return TrainingEngineWeights(engine, iter(weights)), peft_config


def serves_adapters(engine: Any) -> bool:
    """Returns whether an engine has LoRA adapters that verl hands to the rollout as such, without merging them."""
    has_adapters = getattr(engine, "peft_cls", None) is not None or fsdp.is_peft(engine)
    return has_adapters and not engine.model_config.lora.get("merge", False)


def _gathered(stock: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Calls `stock`, which may load offloaded parameters to the GPU, when the first tensor is asked for."""
    weights, peft_config = stock(engine, *args, **kwargs)
    if peft_config is not None and not serves_adapters(engine):
        raise Unsupported(
            f"{type(engine).__name__} has LoRA adapters that sglang_reshard does not recognize; set "
            "model.lora.merge=True"
        )
    yield from weights
