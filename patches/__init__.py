"""What this package adds to a stock SGLang, one file per SGLang module it extends.

SGLang calls `install` in every process it starts, through its entry-point group `sglang.srt.plugins`.
On its way a request passes:

    engine.py, http_server.py   Engine.update_weights_distributed, POST /update_weights_distributed
    tokenizer_manager.py        pause and writer locks, weight_version
    scheduler.py                what the scheduler's state forbids; cache flush; never lets an error out
    tp_worker.py                hands on to the model runner
    model_runner.py             the live parameters: `sglang_reshard.receiver.WeightReceiver`

Nothing that SGLang defines is replaced. One list is appended to (the tokenizer manager's communicators)
and three methods are followed by ours, through SGLang's own hook registry; all else is new methods.
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
        tp_worker,
    )

    for module in (model_runner, tp_worker, scheduler, tokenizer_manager, http_server, engine):
        module.apply()
