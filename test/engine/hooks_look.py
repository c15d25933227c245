"""What test_hooks.py wants to know of the SGLang that this process imports: a line of JSON."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
import pkgutil
import random
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import msgspec

MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "pp": {"pp_size": 2, "disaggregation_mode": "decode"},
    "tokenizers": {"tokenizer_worker_num": 2},
    "ray": {"use_ray": True},
    "elastic": {"elastic_ep_backend": "nixl"},
    "cache": {"weight_cache_mode": "daemon"},
    "offload": {"cpu_offload_gb": 4},
    "offload in groups": {"offload_group_size": 2},
    "paged": {"enable_paged_experts": True},
    "storage": {"hicache_storage_backend": "file"},
    "lmcache": {"enable_lmcache": True},
    "torchao": {"torchao_config": "int8wo"},
}


def ours(hooks: dict[str, Any]) -> dict[str, Any]:
    """Returns the hooks of this package: SGLang's dependencies bring plugins of their own."""
    found = {
        target: [h for h in of_target if h[1].__module__.startswith("sglang_reshard.")]
        for target, of_target in hooks.items()
    }
    return {target: of_target for target, of_target in found.items() if of_target}


def kind_of(hook: Any) -> str:
    return str(hook[0].value)


def look() -> dict[str, Any]:
    from sglang.srt.plugins import load_plugins

    load_plugins()

    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import ServerArgs

    from sglang_reshard.patches import hooks

    extended = (Engine, TokenizerControlMixin, Scheduler)
    seen = {
        "version": metadata.version("sglang"),
        "missing": hooks.missing_hooks(),
        "told": hooks.installed_version(),
        "hooks": {target: sorted(map(kind_of, found)) for target, found in ours(HookRegistry._hooks).items()},
        "parameters": {target: parameters(target) for target in ours(HookRegistry._hooks)},
        "methods": [hasattr(c, "update_weights_distributed") for c in extended],
        "received": sent_and_received(),
        "unsupported": refusals(ServerArgs),
        "options": list(options(ServerArgs)),
        "embeddings": embeddings_before_and_after(),
        "spans": spans_alike(),
    }
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.no_such_method", hooks.installed_version)
    HookRegistry.apply_hooks()
    return {**seen, "told of a renamed one": hooks.installed_version()}


def parameters(target: str) -> list[str]:
    """Returns the names of the parameters that SGLang's own function takes, without the hooks around it."""
    return list(inspect.signature(pkgutil.resolve_name(target)).parameters)


def sent_and_received() -> list[str]:
    """An envelope, on SGLang's own ways between its processes: pickled, and from 0.5.15 as msgpack where so chosen."""
    from sglang.srt.managers import io_struct

    from sglang_reshard.patches.io_struct import UpdateWeightsDistributedReqInput

    envelope = pickle.loads(pickle.dumps(UpdateWeightsDistributedReqInput(payload=b"x", step="commit")))
    if hasattr(io_struct, "msgpack_encode"):
        envelope = io_struct.msgpack_decode(io_struct.msgpack_encode(envelope))
    return [type(envelope).__name__, envelope.payload.decode(), envelope.step]


def embeddings_before_and_after() -> list[int]:
    """How many embeddings of images SGLang's cache of them has, before it is cleared and after."""
    import torch
    from sglang.srt.managers import mm_utils
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

    from sglang_reshard.patches import sglang_versions

    mm_utils.init_mm_embedding_cache(1 << 20)
    module = sys.modules[mm_utils.init_mm_embedding_cache.__module__]
    module.embedding_cache.set(3, EmbeddingResult(embedding=torch.ones(4)))
    sizes = [len(module.embedding_cache)]
    sglang_versions.clear_embedding_cache()
    return [*sizes, len(module.embedding_cache)]


def spans_alike() -> list[bool]:
    """Whether SGLang computes the same spans, of events that are drawn; nothing until 0.5.18."""
    from sglang_reshard.patches.token_versions import Event, spans

    try:
        from sglang.srt.utils.weight_versions import compute_weight_version_spans
    except ImportError:
        return []
    drawn, alike = random.Random(1), []
    for _ in range(200):
        counts = sorted(drawn.choice([drawn.randint(1, 9), 1 << 62]) for _ in range(drawn.randint(0, 4)))
        events, tokens = [Event(drawn.choice("123"), count) for count in counts], drawn.randint(0, 9)
        theirs = compute_weight_version_spans(events, current_version="4", num_output_tokens=tokens)
        alike.append(
            spans(events, "4", tokens) == [{"version": s.version, "start": s.start, "end": s.end} for s in theirs]
        )
    return alike


def options(server_args: type) -> dict[str, Any]:
    """This version's options with their defaults."""
    fields = msgspec.structs.fields if issubclass(server_args, msgspec.Struct) else dataclasses.fields
    return {field.name: field.default for field in fields(server_args)}


def refusals(server_args: type) -> dict[str, str]:
    """What becomes of each mode whose options this version has, all others being as it has them by default."""
    from sglang_reshard.patches.supported_engine import unsupported_reason

    plain = options(server_args)
    return {
        mode: unsupported_reason(SimpleNamespace(**plain | options))
        for mode, options in MODES.items()
        if set(options) <= set(plain)
    }


if __name__ == "__main__":
    print("seen:", json.dumps(look()), flush=True)
