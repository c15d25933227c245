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
_KV_HEADS, _VOCABULARY = "num_key_value_heads", "vocab_size"


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
    sizes, tp = _text_config(config), f"tp={target.tp}"
    attention, experts = target.tp // target.dp, target.tp // target.ep
    of_attention = tp if target.dp == 1 else f"{tp} over dp={target.dp}, which is {attention}"
    for names, divisor, by in (
        (_HEADS, attention, of_attention),
        ((_KV_HEADS,), attention, of_attention),
        ((_VOCABULARY,), target.tp, tp),
        (("intermediate_size",), target.tp, tp),
        (_EXPERTS, target.ep, f"ep={target.ep}"),
        (("moe_intermediate_size",), experts, f"tp/ep={experts}"),
    ):
        for name in names:
            size = sizes.get(name)
            if not isinstance(size, int) or size <= 0:
                continue
            divided, shown = size, f"{name}={size}"
            if name == _VOCABULARY:
                divided = -(-size // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
                shown += f", padded to {divided}"
            if divided % divisor and name != _KV_HEADS:
                yield f"{shown}, which is not divisible by {by}"
            elif divided % divisor and divisor % divided:
                yield f"{shown}, which neither divides {by} nor is divisible by it"


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
