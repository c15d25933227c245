"""What this package adds to a stock SGLang, one file per SGLang module it extends.

SGLang calls `install` in every process it starts, through its entry-point group `sglang.srt.plugins`.
On its way a request passes:

    engine.py, http_server.py   Engine.update_weights_distributed, POST /update_weights_distributed
    torn.py                     while an update that broke off is not made good: no request is served
    outlive.py                  a process of the engine that dies fails calls, and not the trainer (VerlEngine only)
    tokenizer_manager.py        pause and writer locks, weight_version
    scheduler.py                what the scheduler's state forbids; cache flush; never lets an error out
    tp_worker.py                hands on to the model runner
    model_runner.py             the live parameters: `sglang_reshard.receiver.WeightReceiver`

Nothing that SGLang defines is replaced. One list is appended to (the tokenizer manager's communicators)
and some methods have ours before, after or around them, through SGLang's own hook registry: all but those in
torn.py follow. All else is new methods, and a middleware of the server's that does nothing while weights are sound.
"""

from __future__ import annotations


def install() -> None:
    """Entry point. Idempotent; SGLang logs what it raises, and `Engine` then lacks our methods."""
    from sglang_reshard.patches import (
        engine,
        http_server,
        model_runner,
        scheduler,
        tokenizer_manager,
        torn,
        tp_worker,
    )

    for module in (model_runner, tp_worker, scheduler, tokenizer_manager, torn, http_server, engine):
        module.apply()
