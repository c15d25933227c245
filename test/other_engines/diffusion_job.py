"""Tensor parallel ranks of SGLang's diffusion engine, and one trainer rank, the last, which updates their transformers.

The trainer's models are those of diffusers. Each engine rank starts a transformer on a first checkpoint, receives the
weights of a second one, and compares with a start on that one. Writes what differs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard import ModuleSender
from sglang_reshard.errors import ReshardError
from sglang_reshard.selftest.digests import digest
from sglang_reshard.testing import cpu_host

WAIT_S = 60


def join(rank: int, ranks: int, rendezvous: str) -> None:
    """Makes this process a tensor parallel rank of SGLang's diffusion engine."""
    from types import SimpleNamespace

    from sglang.multimodal_gen.runtime import server_args
    from sglang.multimodal_gen.runtime.distributed import parallel_state

    # The models ask for nothing else.
    server_args.set_global_server_args(SimpleNamespace(attention_backend=None))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    parallel_state.init_distributed_environment(ranks, rank, rendezvous, rank, "gloo")
    parallel_state.initialize_model_parallel(
        data_parallel_size=1,
        classifier_free_guidance_degree=1,
        sequence_parallel_degree=1,
        ulysses_degree=1,
        ring_degree=1,
        tensor_parallel_degree=ranks,
    )


def stock(folder: str) -> torch.nn.Module:
    """Returns the transformer of a folder of diffusers', as the engine's own loader starts it."""
    from sglang.multimodal_gen.configs.models.dits import flux, qwenimage, wanvideo
    from sglang.multimodal_gen.runtime.loader.fsdp_load import maybe_load_fsdp_model
    from sglang.multimodal_gen.runtime.models.registry import ModelRegistry

    settings = json.loads(Path(folder, "config.json").read_text())
    kinds = {
        "WanTransformer3DModel": wanvideo.WanVideoConfig,
        "FluxTransformer2DModel": flux.FluxConfig,
        "QwenImageTransformer2DModel": qwenimage.QwenImageDitConfig,
    }
    config = kinds[settings["_class_name"]]()
    config.update_model_arch(settings)
    kind, _ = ModelRegistry.resolve_model_cls(settings.pop("_class_name"))
    return maybe_load_fsdp_model(
        model_cls=kind,
        init_params={"config": config, "hf_config": settings, "quant_config": None},
        weight_dir_list=[str(file) for file in Path(folder).glob("*.safetensors")],
        device=torch.device("cpu"),
        hsdp_replicate_dim=1,
        hsdp_shard_dim=1,
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        strict=False,
    )


def digests(module: torch.nn.Module) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in module.state_dict().items()}


def receive(checkpoints: list[list[str]], folder: Path) -> list[dict[str, Any]]:
    from sglang_reshard.extras.diffusion.receiver import TransformerReceiver

    found = []
    for number, (first, second) in enumerate(checkpoints):
        module = stock(first)
        before, addresses = digests(module), [p.data_ptr() for p in module.parameters()]
        receiver = TransformerReceiver(module)
        receiver.init(said(folder / f"metadata-{number}"))
        refused = not receiver.poll_and_apply(WAIT_S)
        unchanged = digests(module) == before
        updated = receiver.poll_and_apply(WAIT_S)
        after, wanted = digests(module), digests(stock(second))
        found.append(
            {
                "refused": refused and unchanged,
                "updated": updated,
                "tensors": len(wanted),
                "changed": sum(after[name] != before[name] for name in before),
                "differ": [name for name in wanted if after[name] != wanted[name]],
                "in_place": addresses == [p.data_ptr() for p in module.parameters()],
            }
        )
        receiver.close()
    return found


def train(checkpoints: list[list[str]], folder: Path, engine_ranks: int) -> list[str]:
    """Sends an incomplete update, which is refused, and the second checkpoint. Returns the errors of the former."""
    from safetensors.torch import load_file

    dist.init_process_group("gloo", init_method=f"file://{folder}/trainer", rank=0, world_size=1)
    errors = []
    for number, (_, second) in enumerate(checkpoints):
        sender = ModuleSender(timeout_s=WAIT_S)
        partial = folder / f"metadata-{number}.partial"
        partial.write_text(sender.metadata)
        partial.rename(folder / f"metadata-{number}")
        sender.wait_for_receivers(engine_ranks, WAIT_S)
        (file,) = Path(second).glob("*.safetensors")
        weights = load_file(file)
        name = next(name for name in weights if name.endswith(".bias"))
        try:
            sender.update({key: tensor for key, tensor in weights.items() if key != name})
        except ReshardError as error:
            errors.append(f"{type(error).__name__}: {error}")
        reports = sender.update(weights, verify="full")
        assert len(reports) == engine_ranks
        sender.close()
    return errors


def said(file: Path) -> str:
    end = time.monotonic() + WAIT_S
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return file.read_text()


def main() -> None:
    rank, ranks, folder, arguments = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    engine_ranks, checkpoints = ranks - 1, arguments["checkpoints"]
    if rank == engine_ranks:
        found: Any = train(checkpoints, folder, engine_ranks)
    else:
        cpu_host.activate(1)
        join(rank, engine_ranks, f"file://{folder}/rendezvous")
        found = receive(checkpoints, folder)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
