"""What this package adds to a stock SGLang, one file per SGLang module it extends.

SGLang calls `install` in every process it starts, through its entry-point group `sglang.srt.plugins`.
On its way a request passes:

    engine.py, http_server.py   Engine.update_weights_distributed, POST /update_weights_distributed, GET /weights_info
    watch.py, metrics.py        a log line, metrics and a span of it
    torn.py                     while an update that broke off is not made good: no request is served
    outlive.py                  a process of the engine that dies fails calls, and not the trainer (VerlEngine only)
    tokenizer_manager.py        pause and writer locks, weight_version
    weights_info.py             which weights are live, as far as that is known
    scheduler.py                what the scheduler's state forbids; cache flush; never lets an error out
    tp_worker.py                hands on to the model runner
    model_runner.py             the live parameters: `sglang_reshard.engine.receiver.WeightReceiver`

Beside them: what differs between SGLang's versions (versions.py), which engines cannot be updated (fitness.py), and
whether all of this is in place in every process (presence.py).

Nothing that SGLang defines is replaced. One list is appended to (the tokenizer manager's communicators)
and some methods have ours before, after or around them, through SGLang's own hook registry: all but those in
torn.py and weights_info.py follow. All else is new methods and routes, and a middleware of the server's that does
nothing while weights are sound.
"""

from __future__ import annotations

from functools import cache


@cache  # a hook that is registered twice runs twice
def install() -> None:
    """Entry point. Idempotent; SGLang logs what it raises, and `Engine` then lacks our methods."""
    from sglang_reshard.observability.logs import configure
    from sglang_reshard.patches import (
        engine,
        http_server,
        metrics,
        model_runner,
        scheduler,
        tokenizer_manager,
        torn,
        tp_worker,
        versions,
        weights_info,
    )

    versions.check()
    configure()

    for module in (
        model_runner,
        tp_worker,
        scheduler,
        tokenizer_manager,
        torn,
        metrics,
        weights_info,
        http_server,
        engine,
    ):
        module.apply()
