"""An update imports no capability that it does not use."""

import subprocess
import sys

UPDATES = """
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sglang_reshard import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def load_weights(self, tensors):
        parameters = dict(self.named_parameters())
        for name, tensor in tensors:
            parameters[name].data.copy_(tensor)


def main(folder):
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 1), rank=0, world_size=1)
    mesh, trained, served = init_device_mesh("cpu", (1,)), Model().requires_grad_(False), Model().requires_grad_(False)
    weights = [(name, distribute_tensor(p, mesh, [Shard(0)])) for name, p in trained.named_parameters()]
    receiver = WeightReceiver(TracedModel(served), 0, 1, torch.device("cpu"))
    sender = WeightSender.over(dist.group.WORLD, receiver.update, timeout_s=30, transport="{transport}")
    for _ in range(2):
        sender.update(weights)
        assert all(torch.equal(served.get_parameter(name), tensor._local_tensor) for name, tensor in weights)
        for _, tensor in weights:
            tensor._local_tensor.add_(1)
    sender.close()
    receiver.close()
    dist.destroy_process_group()


with tempfile.TemporaryDirectory() as folder:
    main(folder)
print("\\n".join(name for name in sys.modules if name.startswith("sglang_reshard.")))
"""
CAPABILITIES = (
    "engine.names", "extras", "trainer.tied_heads", "cli",
    *(f"derived.{name}" for name in ("search", "laziness", "in_place")),
    *(f"landings.{name}" for name in ("checked", "converting", "shadow")),
    *(f"routes.{name}" for name in ("broadcast", "delta", "disk", "nixl", "p2p", "relay")),
    *(f"sources.{name}" for name in (
        "conversion", "flat", "fsdp", "fsdp1", "fused", "lora", "lora_config", "lora_layers",
        "megatron_lora", "traced_parameters", "verl_shard_spec", "versions")),
    *(f"trace.{name}" for name in (
        "block_formats", "block_fp8", "built_modules", "converter_trace", "converting_loader",
        "folded", "gaps", "initial_values", "kept", "kv_scales", "left_alone", "post_load",
        "quantized_parts", "repack", "scalars", "stock_load")),
)  # fmt: skip


def test_a_plain_update_imports_no_capability():
    done = subprocess.run(
        [sys.executable, "-c", UPDATES.replace("{transport}", "ipc")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    names = [name.removeprefix("sglang_reshard.") for name in done.stdout.split()]
    assert {"trace.tracer", "trainer.worker", "routes.ipc"} <= set(names)
    assert [name for name in names if any(name == c or name.startswith(f"{c}.") for c in CAPABILITIES)] == []
