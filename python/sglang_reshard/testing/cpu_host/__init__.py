"""What stock SGLang needs to run on a host without a GPU; never used on a host with one.

SGLang serves on CPUs that have its own AMX build. The wheel on PyPI is the CUDA build, and four things
keep it from starting where there is no GPU: it imports `sgl_kernel`, whose binary needs `libcuda.so.1`;
it starts NCCL; it wants one NUMA node for each TP rank; and it compiles kernels at the first request.
Nothing installed is edited. The stand-in for `sgl_kernel` comes first on PYTHONPATH, so that the spawned
schedulers find it too, and the rest is environment variables that SGLang reads.

    cpu_host.activate(tp_size=2)      # before anything of sglang is imported
    engine = sglang.Engine(model_path=..., tp_size=2, **cpu_host.engine_arguments())
"""

from sglang_reshard.testing.cpu_host.arguments import command_line, engine_arguments
from sglang_reshard.testing.cpu_host.host import STAND_IN, GpuHost, activate, environment

__all__ = ["STAND_IN", "GpuHost", "activate", "command_line", "engine_arguments", "environment"]
