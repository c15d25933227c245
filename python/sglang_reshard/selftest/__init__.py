"""Proves on the user's own machine that weights arrive: `sglang-reshard selftest`, and `make demo`.

    launcher        chooses runs for this host, starts them one after the other, shows progress, gives the verdict
     └─ each run    trainer ranks (`rank`); the first one starts a real SGLang engine, and all take the steps of `steps`

choice   the runs of a host, the most important first
models   the model's configuration
trainer  one trainer rank's weights: they change by gradient steps
steps    the steps of a run, and its judges: SGLang, transformers and torch
mishaps  a trainer rank and an engine rank are killed in the middle of an update
table    the verdict for people
"""
