"""Says which of a model's sizes an engine's parallel sizes do not divide. SGLang often asserts it without a message."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_reshard.cli.plan.request import EngineSizes
from sglang_reshard.errors import Mismatch

_VOCABULARY_PADDING = 64  # SGLang rounds the vocabulary up to this before it divides it
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def check_stages(config: Mapping[str, Any], target: EngineSizes, model: str) -> None:
    """Raises Mismatch if the model has fewer layers than the engine has pipeline stages."""
    layers = _text_config(config).get("num_hidden_layers")
    if isinstance(layers, int) and target.pp > layers:
        raise Mismatch(
            f"--target {target}: {model} has {layers} layers, and pp={target.pp} needs a layer for each pipeline stage"
        )


def start_failure(error: BaseException, config: Mapping[str, Any], target: EngineSizes, model: str) -> str:
    """Returns what SGLang failed with, or the assertion if it has no message, and the sizes that may be the cause."""
    text = f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__} of `{_statement(error)}`"
    reasons = tuple(indivisible(config, target)) if isinstance(error, (AssertionError, ValueError)) else ()
    return f"{text}; {model} has {', and '.join(reasons)}" if reasons else text


def indivisible(config: Mapping[str, Any], target: EngineSizes) -> Iterator[str]:
    """Yields each size of the model that is not divisible by the engine's, as "num_attention_heads=32, which ..."."""
    sizes = _text_config(config)
    attention = target.tp // target.dp
    of_attention = f"tp={target.tp}" if target.dp == 1 else f"tp={target.tp} over dp={target.dp}, which is {attention}"
    for name in _present(sizes, _HEADS):
        if sizes[name] % attention:
            yield f"{name}={sizes[name]}, which is not divisible by {of_attention}"
    for name in _present(sizes, ("num_key_value_heads",)):
        if sizes[name] % attention and attention % sizes[name]:
            yield f"{name}={sizes[name]}, which neither divides {of_attention} nor is divisible by it"
    for name in _present(sizes, ("vocab_size",)):
        padded = -(-sizes[name] // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
        if padded % target.tp:
            yield f"{name}={sizes[name]}, padded to {padded}, which is not divisible by tp={target.tp}"
    for name in _present(sizes, ("intermediate_size",)):
        if sizes[name] % target.tp:
            yield f"{name}={sizes[name]}, which is not divisible by tp={target.tp}"
    for name in _present(sizes, _EXPERTS):
        if sizes[name] % target.ep:
            yield f"{name}={sizes[name]}, which is not divisible by ep={target.ep}"
    for name in _present(sizes, ("moe_intermediate_size",)):
        if sizes[name] % (experts := target.tp // target.ep):
            yield f"{name}={sizes[name]}, which is not divisible by tp/ep={experts}"


def _present(sizes: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[str]:
    yield from (name for name in names if isinstance(sizes.get(name), int) and sizes[name] > 0)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _statement(error: BaseException) -> str:
    """Returns the statement that raised the error, with its file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "?"
    last = frames[-1]
    statement = linecache.getline(last.filename, last.lineno or 0).strip()
    return f"{statement}` at `{last.filename.rpartition('/')[2]}:{last.lineno}"
