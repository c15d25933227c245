"""Describes a LoRA adapter that PEFT trains to SGLang, which computes W + lora_alpha / r * B @ A with the engine's W.

An option of PEFT is accepted if this has been shown to be the same. All others must be unset: those that a newer PEFT
adds, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.sources.lora_layers import check_layers, target_modules

# Options of any value: those that choose modules and first values, or say where an adapter comes from and how it is
# trained, and those that are read below.
_MODULES = {"target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"}
_VALUES = {"r", "lora_alpha", "use_rslora", "init_lora_weights", "loftq_config", "eva_config", "corda_config"}
_ORIGIN = {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"}
_TRAINING = {"lora_ga_config", "lora_dropout", "fan_in_fan_out", "velora_config", "inference_mode", "runtime_config"}
_WITH_OTHERS = {"qalora_group_size", "megatron_core"}  # have an effect with use_qalora and megatron_config only
_ANY_VALUE = _MODULES | _VALUES | _ORIGIN | _TRAINING | _WITH_OTHERS
_UNSET = {"bias": ("none",)}  # besides None, False and what is empty
_KEEPS_BASE = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")  # of init_lora_weights
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_CHANGED = "changed_base"  # in the result: the option that has changed the base weights
_WHAT = {
    "use_dora": "DoRA's magnitudes",
    "kasa_config": "KaSA's singular values and base weights",
    "use_bdlora": "block-diagonal matrices",
    "lora_bias": "biases",
    "bias": "biases of an adapter",
    "rank_pattern": "ranks that differ between modules",
    "alpha_pattern": "scalings that differ between modules",
    "modules_to_save": "whole modules",
    "trainable_token_indices": "trained tokens",
    "layer_replication": "repeated layers",
    "ensure_weight_tying": "tied adapters",
    "alora_invocation_tokens": "adapters that invocation tokens activate",
    "arrow_config": "routed adapters",
    "monteclora_config": "sampled adapters",
    "use_qalora": "QA-LoRA's groups",
}


def adapter_config(config: Any, adapter: str = "default") -> str:
    """Returns what SGLang has to know of an adapter, in JSON.

    SGLang scales every adapter by lora_alpha / r. For rsLoRA the result has the lora_alpha that makes this PEFT's
    scaling. For an adapter whose initialization has changed the base weights (PiSSA) the result says so, and
    `WeightSender.lora_adapter` takes both.

    config   a PEFT model, its `peft_config[adapter]`, or that as a mapping

    Raises Unsupported, naming the option, for an adapter that SGLang would not compute as PEFT does, and as
    `adapter_tensors` does for a model.
    """
    given = getattr(config, "peft_config", config)
    adapters = given if isinstance(given, Mapping) and adapter in given else {adapter: given}
    options = _options(adapters[adapter])
    needed = {"r", "lora_alpha", "target_parameters" if options.get("target_parameters") else "target_modules"}
    if missing := sorted(name for name in needed if options.get(name) is None):
        raise Mismatch(f"the adapter's configuration lacks {', '.join(missing)}; pass model.peft_config['default']")
    check_options(options)
    # The base weights are those of all adapters.
    changed = next(filter(None, (_changed_base(_options(of_one)) for of_one in adapters.values())), "")
    of_experts = target_modules(options.get("target_parameters") or ())
    modules = options.get("target_modules") or ()
    if isinstance(modules, str) and modules not in ("all", "all-linear"):
        raise Unsupported(
            f"target_modules={modules!r} is a pattern, and SGLang does not serve patterns; list the modules"
        )
    if isinstance(config, nn.Module):
        check_layers(config, adapter)
    rank, alpha = int(options["r"]), options["lora_alpha"]
    if options.get("use_rslora"):
        alpha *= math.sqrt(rank)  # SGLang scales by lora_alpha / r, and rsLoRA by lora_alpha / sqrt(r)
    return json.dumps(
        {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": modules if isinstance(modules, str) else sorted({*modules, *of_experts}),
            **({_CHANGED: changed} if changed else {}),
        }
    )


def check_options(options: Mapping[str, Any]) -> None:
    """Raises Unsupported, naming the option, for PEFT's configuration of an adapter that SGLang does not serve."""
    kind = str(getattr(options.get("peft_type"), "value", options.get("peft_type") or "LORA"))
    if kind != "LORA":
        raise Unsupported(
            f"peft_type={kind}: SGLang serves only LoRA adapters; merge this adapter into the weights instead"
        )
    for option, value in options.items():
        if option not in _ANY_VALUE and value and value not in _UNSET.get(option, ()):
            raise _refused(option, value)


def check_base(config: str) -> None:
    """Raises Unsupported for the configuration of an adapter that needs other base weights than the engine has.

    Raises Mismatch for one that is no result of `adapter_config`.
    """
    try:
        changed = json.loads(config).get(_CHANGED)
    except (AttributeError, TypeError, ValueError):
        raise Mismatch(f"the configuration of an adapter is {config!r:.60}; pass adapter_config(model)") from None
    if changed:
        raise Unsupported(
            f"{changed} has changed the base weights that the adapter belongs to: over the engine's it computes "
            "something else. Pass them, too: lora_adapter(name, config, base=base_tensors(model)), or merge the "
            "adapter into the weights (in verl, model.lora.merge=True)"
        )


def with_base(config: str) -> str:
    """Returns the configuration of an adapter whose base weights the engine has been sent."""
    return json.dumps({name: value for name, value in json.loads(config).items() if name != _CHANGED})


def _options(config: Any) -> dict[str, Any]:
    return dict(config if isinstance(config, Mapping) else config.to_dict())


def _changed_base(options: Mapping[str, Any]) -> str:
    """Returns the option that has changed the base weights; empty if none has."""
    value = options.get("init_lora_weights")
    init = str(value).lower()
    if init in _KEEPS_BASE:
        return ""
    if init.startswith(_CHANGES_BASE):
        return f"init_lora_weights={value!r}"
    raise _refused("init_lora_weights", value)


def _refused(option: str, value: Any) -> Unsupported:
    what = _WHAT.get(option, "this option")
    return Unsupported(
        f"{option}={value!r}: SGLang does not serve {what}; train without it, or merge the adapter into the weights "
        "and update the weights"
    )
