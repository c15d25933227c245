"""What trainer ranks on the hosts of test_engines.py do: they train, and update an engine of several hosts.

torchrun ... engine_job.py FOLDER TP_SIZE URL TRANSPORT SHARDING          # of a server
torchrun ... engine_job.py FOLDER TP_SIZE embedded TRANSPORT SHARDING     # started here, over all trainer hosts
torchrun ... engine_job.py FOLDER TP_SIZE,... URL,... nixl SHARDING       # of several servers that pass on the weights

SHARDING is "fsdp", FSDP2 over all ranks, or "fsdp_tp", over hosts and over the tensor parallel ranks of each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from transformers import AutoConfig, Qwen3ForCausalLM

from benchmark.reference import greedy_tokens
from sglang_reshard import MultiEngineSender, UpdateReport, WeightSender
from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.control import Address
from sglang_reshard.protocol.session import Session
from sglang_reshard.selftest.digests import read_live_digests
from sglang_reshard.selftest.trainer import TP_PLAN
from sglang_reshard.trainer.collectives import broadcast_message
from support.live_engines import NEW_TOKENS, PROMPTS, greedy, live_engine
from tools.oracle.http_engine import HttpEngine


class Server:
    def __init__(self, folder: Path, tp_size: int, url: str, transport: str) -> None:
        self._folder, self._tp_size, self._url = folder, tp_size, url
        self._sender = WeightSender(url, timeout_s=90, transport=transport)

    def update(self, model: nn.Module, version: str) -> UpdateReport:
        return self._sender.update(model, weight_version=version, verify="full")

    def tokens(self) -> list[list[int]]:
        return [] if dist.get_rank() else greedy(RemoteEngine(self._url))

    def digests(self, version: str) -> list[Any]:
        if dist.get_rank():
            return []
        engine = HttpEngine(self._url.removeprefix("http://"), self._tp_size)
        return read_live_digests(engine, self._folder / f"digests-{version}")

    def close(self) -> None:
        self._sender.close()


class Servers:
    """Servers of several sizes, which read from each other."""

    def __init__(self, folder: Path, tp_sizes: list[int], urls: list[str]) -> None:
        self._servers = [HttpEngine(url.removeprefix("http://"), tp) for url, tp in zip(urls, tp_sizes, strict=True)]
        self._folder, self._urls, rank = folder, urls, dist.get_rank()
        interface = os.environ["MASTER_ADDR"]
        self._host = Session.host(interface) if rank == 0 else None
        group = dist.group.WORLD
        assert group is not None
        address = broadcast_message(self._host.address if self._host else None, Address, group)
        ranks = tuple(range(dist.get_world_size()))
        options = {"transport": "nixl", "relay": True, "timeout_s": 90}
        self._sender = MultiEngineSender(address, trainer_rank=rank, global_ranks=ranks, **options)
        engines = [RemoteEngine(url).update_weights_distributed if rank == 0 else None for url in urls]
        self._sender.set_engines(dict(zip(urls, engines, strict=True)))

    def update(self, model: nn.Module, version: str) -> Reports:
        return Reports(self._sender.update(model, weight_version=version, verify="full"))

    def tokens(self) -> list[list[int]]:
        found = [greedy(RemoteEngine(url)) for url in self._urls] if dist.get_rank() == 0 else [[]]
        assert all(tokens == found[0] for tokens in found)
        return found[0]

    def digests(self, version: str) -> list[Any]:
        if dist.get_rank():
            return []
        folders = (self._folder / f"digests-{version}-{number}" for number in range(len(self._servers)))
        return [read_live_digests(server, folder) for server, folder in zip(self._servers, folders, strict=True)]

    def close(self) -> None:
        self._sender.close()


class Reports(dict[str, UpdateReport]):
    """By server."""

    def as_dict(self) -> dict[str, Any]:
        return {name: report.as_dict() for name, report in self.items()}


class Embedded:
    """Started by the trainer on all of its hosts, with no interface given."""

    def __init__(self, folder: Path, tp_size: int) -> None:
        ranks = dist.get_world_size()
        hosts = ranks // int(os.environ["LOCAL_WORLD_SIZE"])
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "timeout_s": 90}
        options |= {"nnodes": hosts, "dist_init_addr": f"{os.environ['MASTER_ADDR']}:25000"}
        self._engine = live_engine(init_device_mesh("cpu", (ranks,)), folder / "model", tp_size=tp_size, **options)

    def update(self, model: nn.Module, version: str) -> UpdateReport:
        return self._engine.update_weights_from_tensor(model, weight_version=version, verify="full")

    def tokens(self) -> list[list[int]]:
        return greedy(self._engine)

    def digests(self, _version: str) -> list[Any]:
        """None: SGLang itself sends tensors to engine ranks by memory that they share, so to one host only."""
        return []

    def close(self) -> None:
        self._engine.shutdown()


def sharded(model: nn.Module, sharding: str) -> tuple[nn.Module, int]:
    """The model, sharded; and the number of the data that this rank trains on."""
    if sharding == "fsdp":
        return fully_shard(model), dist.get_rank()
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (dist.get_world_size() // per_host, per_host), mesh_dim_names=("fsdp", "tp"))
    return fully_shard(parallelize_module(model, mesh["tp"], TP_PLAN), mesh=mesh["fsdp"]), mesh["fsdp"].get_local_rank()


def main(folder: Path, tp_sizes: str, where: str, transport: str, sharding: str, last: str = "") -> None:
    """`last`: the last update is the last thing that is done to the engine; what it holds is not looked at."""
    dist.init_process_group("cpu:gloo")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "model")
    model, data_rank = sharded(Qwen3ForCausalLM(config).float(), sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
    sizes, urls = [int(size) for size in tp_sizes.split(",")], where.split(",")
    engine: Embedded | Server | Servers
    if len(urls) > 1:
        engine = Servers(folder, sizes, urls)
    else:
        engine = Embedded(folder, *sizes) if where == "embedded" else Server(folder, *sizes, where, transport)
    seen = []
    for version in ("1", "2"):
        tokens = torch.arange(24).view(2, 12) + data_rank
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        report = engine.update(model, version)
        if last and version == "2":
            break
        found = {"report": report.as_dict(), "tokens": engine.tokens(), "digests": engine.digests(version)}
        if dist.get_rank() == 0:
            with torch.device("meta"):
                unsharded = Qwen3ForCausalLM(config)
            unsharded.save_pretrained(folder / version, state_dict=state)
            seen.append(found | {"expected": greedy_tokens(folder / version, PROMPTS, NEW_TOKENS, "float32")[0]})
        dist.barrier()
    if dist.get_rank() == 0:
        (folder / "seen.json").write_text(json.dumps(seen))
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
