"""The trainer's end: sends requests of updates to the workers of a vLLM engine.

    llm = vllm.LLM(path, tensor_parallel_size=2, worker_extension_cls=EXTENSION)    # trainer rank 0
    sender = WeightSender.over(group, send_to(llm))                                 # None on the others
    report = sender.update(model.named_parameters())

EXTENSION is the path of the class in `worker`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_reshard.errors import Unsupported
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    decode,
    encode,
)

_METHOD = "reshard_update"  # of `worker.ReshardWorker`


def send_to(llm: Any) -> Callable[[DistributedUpdateWeightsReq], DistributedUpdateWeightsOutput]:
    """Returns what sends requests to `llm`, a `vllm.LLM` whose worker extension is `ReshardWorker`.

    An update runs between two steps of the engine. With flush_cache, vLLM's prefix cache is reset after it. vLLM itself
    does not refuse requests after TornWeights: do not generate until an update has succeeded.
    """

    def send(request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
        if request.flush_cache == "by_version":
            raise Unsupported("vLLM's prefix cache has no versions: pass flush_cache=True or False")
        answers = llm.collective_rpc(_METHOD, args=(encode(request),))
        outputs = [decode(answer, DistributedUpdateWeightsOutput) for answer in answers]
        output = min(outputs, key=lambda o: (not o.torn, o.success))  # the worst; that of rank 0 if all have succeeded
        if request.flush_cache and (output.success or output.torn):
            llm.reset_prefix_cache()
        return output

    return send
