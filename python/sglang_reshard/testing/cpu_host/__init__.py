"""Lets stock SGLang run on a host without a GPU; refuses to be used on a host with one.

SGLang serves on CPUs with its AMX build. The wheel on PyPI is the CUDA build, which does not start without a GPU for
four reasons: it imports `sgl_kernel`, whose binary needs `libcuda.so.1`; it starts NCCL; it requires one NUMA node per
TP rank; and it compiles kernels at the first request. Nothing installed is modified. A stub of `sgl_kernel` comes first
on PYTHONPATH, so that the spawned schedulers find it too, and the rest is environment variables that SGLang reads.

    cpu_host.activate(tp_size=2)      # before anything of sglang is imported
    engine = sglang.Engine(model_path=..., tp_size=2, **cpu_host.engine_arguments())
"""

from sglang_reshard.testing.cpu_host.arguments import command_line, engine_arguments
from sglang_reshard.testing.cpu_host.host import STAND_IN, GpuHost, activate, environment

__all__ = ["STAND_IN", "GpuHost", "activate", "command_line", "engine_arguments", "environment"]
