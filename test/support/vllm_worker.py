"""A worker extension for tests: vLLM's linear layers keep their weights, as they do on GPUs, and tell their digests.

On a CPU they give their weights to a packed copy of oneDNN's and keep none. vLLM falls back to torch where that is not
available, and this says that it is not: vLLM imports a worker extension before it loads the model.
"""

from __future__ import annotations

import vllm._custom_ops as ops
import vllm.model_executor.layers.utils as layers

from sglang_reshard.extras.vllm.worker import ReshardWorker
from sglang_reshard.selftest.digests import digest

ops._supports_onednn = False
layers.check_cpu_sgl_kernel = lambda *_: False


class UnpackedWorker(ReshardWorker):
    def reshard_digests(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self.get_model().state_dict().items()}
