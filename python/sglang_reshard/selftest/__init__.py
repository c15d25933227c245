"""Proves on the user's own machine that weights arrive: what `sglang-reshard selftest` and `make demo` run.

    launcher        chooses runs for this host, starts them one after the other, shows progress, gives the verdict
     └─ each run    trainer ranks (`rank`), of which the first has a real SGLang engine; they take the steps of `steps`

choice   which runs, in which order: the most important first
layouts  how a trainer is sharded, and how an engine is
models   the model's configuration
trainer  one trainer rank's weights: they change by gradient steps
steps    what a run does and what is seen; nothing in it is judged by this package
mishaps  a trainer rank and an engine rank are killed in the middle of an update
table    the verdict for people
"""
