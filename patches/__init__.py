"""Extends a stock SGLang, one file per SGLang module. SGLang calls `install` in every process it starts.

A request of an update passes:

    engine.py, http_server.py   Engine.update_weights_distributed, POST /update_weights_distributed, GET /weights_info
    update_observer.py          log line, metrics (metrics.py) and span
    request_gate.py             refuses all requests while the weights are torn, or missing
    sound_weights.py            from a failed write until the next successful update, or until there are some
    embedded_engine_guard.py    keeps the trainer alive, and raises EngineDied, if a process of its engine dies
    tokenizer_manager.py        validation, pause and writer locks, weight_version
    schedulers.py               asks the schedulers, and waits for the answer of all
    prefill_decode.py           refuses a prefill or a decode server that is not paused
    weights_info.py             records which weights are live
    snapshot_loads.py           POST /load_snapshot: a snapshot of a folder, never an earlier one than is live
    disk_loads.py               what SGLang's own loads from disk have done, on all ranks
    weights_sharing.py          POST /pull_weights and /share_weights: from one server to another, without a trainer
    scheduler.py                checks the scheduler's state; flushes the cache; catches all exceptions
    cache_versions.py           or keeps the cache of each weight version apart
    token_versions.py           records which weights have computed which output tokens
    pipeline.py                 lets all stages of a pipelined engine handle it together
    model_runner.py             the live parameters: `sglang_reshard.engine.receiver.WeightReceiver`
    repacking.py                whose modules are remembered as SGLang built them, before it repacked them
    engine_start.py             how the engine was started; spares persistent buffers on dummy weights
    draft_models.py             with the draft models of speculative decoding, and their workers' copies
    lora_adapters.py            or a LoRA adapter, which lora_names.py registers: also by a `WeightReceiver`;
                                lora_trial.py tries before whether SGLang can load all of it;
                                lora_missing_experts.py clears the experts and the embedding that it lacks

sglang_versions.py handles the differences between SGLang's versions, supported_engine.py recognises engines that cannot
be updated, hooks.py checks that every process has these patches, attached.py keeps state on SGLang's objects,
custom_group.py joins the groups that trainers broadcast over.

Nothing that SGLang defines is replaced; pipeline.py wraps two methods of a pipelined engine's schedulers. One list is
appended to (the tokenizer manager's communicators), and some functions get hooks (hooks.py) through SGLang's own hook
registry (entry-point group `sglang.srt.plugins`). Everything else is new methods and routes, and a middleware of the
server that passes everything through while the weights are sound.
"""

from __future__ import annotations

from functools import cache


@cache  # a hook that is registered twice runs twice
def install() -> None:
    """Entry point. Idempotent. SGLang logs what it raises, and `Engine` then lacks the methods of this package."""
    from sglang_reshard.observability.logs import configure
    from sglang_reshard.patches import engine, hooks, scheduler, sglang_versions, tokenizer_manager

    sglang_versions.check()
    configure()
    hooks.register()
    for module in (scheduler, tokenizer_manager, engine):  # an engine has its methods only if all else is in place
        module.apply()
