"""How tests start processes: forks of a server that has imported already what they use.

A process that imports pytest, hypothesis and this package by itself takes half a second of CPU time for it, and an
update in a test has four or more of them.
"""

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.tensor.parallel",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "hypothesis",
        "pytest",
        "rich.console",
        "safetensors.torch",
        "sglang_reshard.extras.modules.receiver",
        "sglang_reshard.extras.modules.sender",
        "sglang_reshard.api.multi_engine",
        "sglang_reshard.api.weight_sender",
        "sglang_reshard.engine.receiver",
    ]
)
