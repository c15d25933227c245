"""The whole way on one machine, with nothing simulated but the size of the model: what `make demo` runs.

    launcher          sizes, memory check, progress, deadline, verdict; starts the two below, one after the other
     ├─ torchrun ─ trainer ranks    a transformers Qwen3 as tensor parallel DTensors; VerlEngine; optimizer steps
     │              └─ SGLang engine, TARGET_TP scheduler processes, on dummy weights at first
     └─ expected    what a stock load of the trainer's checkpoints puts on every engine rank, as digests

`sequence.py` is the demo itself, as one would tell it; `verdict.py` says what counts as proof.
"""
