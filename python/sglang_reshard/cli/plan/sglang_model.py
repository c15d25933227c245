"""Builds one engine rank's real SGLang model in this process, without an Engine and without the other ranks.

torch's fake process group stands in for the other ranks: nothing communicates while a model is built
or loaded, so one process can be any rank of any world. One process can be only one rank, though:
SGLang keeps its groups and server arguments in globals.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sglang_reshard.testing import cpu_host


def choose_code_paths(tp_size: int, *, gpu: bool) -> None:
    """Makes SGLang importable on a host without a GPU. Must be called before sglang is imported.

    SGLang decides at import whether it runs on a CPU engine or a GPU, and some loaders differ. With
    `gpu` the models are built as they are on a GPU, only in host memory.
    """
    cpu_host.activate(tp_size)
    if gpu:
        del os.environ["SGLANG_USE_CPU_ENGINE"]
        # All that the GPU path wants of vllm is an old rotary kernel, at import.
        for name in ("vllm", "vllm._custom_ops"):
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            vars(module)["rotary_embedding"] = None
            sys.modules[name] = module
        # Some models make streams while they are built, and ask what the device can do. Nothing runs on either.
        vars(torch.cuda)["Stream"] = _NoStream
        vars(torch.cuda)["get_device_capability"] = lambda *_: (9, 0)


class _NoStream:
    def __init__(self, *_: Any, **__: Any) -> None:
        """Stands in for a CUDA stream, which cannot be created without a device."""


def import_before_forks() -> None:
    """Imports what is slow to import of SGLang, so that children forked afterwards share it."""
    import sglang.srt.model_loader
    import sglang.srt.models.registry
    import sglang.srt.server_args  # noqa: F401


def build_rank(
    model_path: str,
    *,
    tp_size: int,
    tp_rank: int,
    ep_size: int = 1,
    pp_size: int = 1,
    pp_rank: int = 0,
    dtype: str = "bfloat16",
    weightless: bool = False,
    weights: str | None = None,
    **server_args: Any,
) -> torch.nn.Module:
    """Returns the model that this engine rank would hold, with dummy weights in host memory.

    weightless  build on the meta device instead, without memory for weights
    weights     a folder of safetensors, which SGLang loads as it starts an engine on them
    """
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.model_loader import get_model
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.common import reserve_rope_cache_for_long_sequences

    defaults: dict[str, Any] = {
        "load_format": "dummy" if weights is None else "auto",
        "skip_tokenizer_init": True,
        "max_running_requests": 4,
        "sampling_backend": "pytorch",
        "log_level": "error",
        "disable_custom_all_reduce": True,
    }
    args = ServerArgs(
        **cpu_host.engine_arguments(
            **defaults
            | {"model_path": model_path, "tp_size": tp_size, "ep_size": ep_size, "pp_size": pp_size}
            | {"dtype": dtype}
            | server_args
        )
    )
    publish_arguments(args, tp_rank, pp_rank)
    with_known(initialize_moe_config, server_args=args)
    with_known(initialize_fp8_gemm_config, server_args=args)
    with_known(initialize_fp4_gemm_config, server_args=args)
    _join_fake_world(
        tp_size=tp_size,
        ep_size=ep_size,
        pp_size=pp_size,
        attention_dp_size=args.dp_size if args.enable_dp_attention else 1,
        rank=pp_rank * tp_size + tp_rank,
    )
    config = ModelConfig.from_server_args(args)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        # As ModelRunner does on a CPU: heads that the ranks do not divide are padded, not repeated.
        config = adjust_config_with_unaligned_cpu_tp(config, LoadConfig(load_format="dummy"), tp_size)
    with_known(initialize_dp_attention, server_args=args, model_config=config)
    device, load = DeviceConfig("cpu", 0), LoadConfig(load_format=args.load_format)
    if weightless:
        build_on_meta(device)
    if weights is not None:
        config.model_path = weights
    model = get_model(model_config=config, load_config=load, device_config=device)
    # What ModelRunner does next; it changes the length of a buffer.
    with_known(reserve_rope_cache_for_long_sequences, model=model, server_args=args, model_config=config)
    return model


def publish_arguments(args: Any, tp_rank: int, pp_rank: int) -> None:
    """Makes the arguments those of this process. Newer versions need the rank of the process, too."""
    try:
        from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    except ImportError:
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(args)
        return
    world_rank = spawn_world_rank(args, tp_rank=tp_rank, pp_rank=pp_rank)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=0))


def with_known(function: Callable[..., Any], **given: Any) -> Any:
    """Calls a function with those arguments that it has: newer versions read some from the published configuration."""
    parameters = inspect.signature(function).parameters
    return function(**{name: value for name, value in given.items() if name in parameters})


def _join_fake_world(*, tp_size: int, ep_size: int, pp_size: int, attention_dp_size: int, rank: int) -> None:
    import sglang.srt.distributed.device_communicators.shm_broadcast as shm_broadcast
    import sglang.srt.distributed.parallel_state as parallel_state
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    new_group = dist.new_group

    def new_fake_group(ranks: Any = None, *_: Any, **__: Any) -> Any:
        return new_group(ranks, backend="fake")

    # SGLang asks for gloo groups too, and for a queue in shared memory that waits for the others.
    dist.new_group = new_fake_group
    shm_broadcast.MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)
    parallel_state.set_custom_all_reduce(False)
    world_size = tp_size * pp_size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    parallel_state.init_distributed_environment(world_size=world_size, rank=rank, local_rank=0, backend="fake")
    with_known(
        parallel_state.initialize_model_parallel,
        tensor_model_parallel_size=tp_size,
        expert_model_parallel_size=ep_size,
        pipeline_model_parallel_size=pp_size,
        attention_data_parallel_size=attention_dp_size,
        backend="fake",
    )


# -- without memory for weights


def build_on_meta(device: Any) -> None:
    """Makes this process build SGLang models on the meta device from now on; `device` is SGLang's DeviceConfig.

    For a process that builds nothing else. Single elements, such as the scales of a KV cache, are in host memory
    all the same: SGLang looks at their values before the model is complete. So are tensors for which a module names a
    device itself, see `live_storages`.
    """
    from sglang.srt.model_loader import loader
    from sglang.srt.models import transformers as wrapper  # of transformers' own models

    initialize = loader._initialize_model

    def initialized(*args: Any, **kwargs: Any) -> torch.nn.Module:
        with _WithoutDevices():
            model = initialize(*args, **kwargs)
        _give_values(model)
        return model

    def leave(*_: Any, **__: Any) -> None:
        """Writes no dummy values, and allocates no memory."""

    # It takes parameters on the meta device for those that it has not replaced, and gives them memory and no loader.
    wrapper.TransformersBase._init_parameters = leave
    loader._initialize_model = initialized
    loader.initialize_dummy_weights = leave
    device.device = torch.device("meta")  # SGLang's own class refuses the word


class _WithoutDevices(TorchFunctionMode):
    """Leaves on the meta device what a constructor would put on the GPU by name.

    Makes `torch.tensor` of a number on the CPU: constructors compute with such tensors, and ask for their values.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        device = options.get("device")
        if isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda":
            options["device"] = "meta"
        # By name: libraries wrap `torch.tensor`.
        elif (
            getattr(func, "__name__", "") == "tensor"
            and device is None
            and args
            and isinstance(args[0], (bool, int, float))
        ):
            options["device"] = "cpu"
        return func(*args, **options)


def _give_values(model: torch.nn.Module) -> None:
    """Moves parameters of one element to host memory; nothing else about them changes."""
    known: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.numel() != 1 or parameter.device.type != "meta":
                continue
            if id(parameter) not in known:
                value = torch.ones(parameter.shape, dtype=parameter.dtype, device="cpu")
                real: Any = torch.Tensor._make_subclass(type(parameter), value, False)
                vars(real).update(vars(parameter))
                known[id(parameter)] = real
            module._parameters[name] = known[id(parameter)]
