"""What trainer ranks on the hosts of test_engines.py do: they train with FSDP2, and update an engine of several hosts.

torchrun ... engine_job.py FOLDER TP_SIZE URL TRANSPORT          # of a server
torchrun ... engine_job.py FOLDER TP_SIZE embedded TRANSPORT     # started here, over all of the trainer's hosts
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, Qwen3ForCausalLM

from demo.reference import greedy_tokens
from oracle.digests import read_live_digests
from sglang_reshard import UpdateReport, VerlEngine, WeightSender
from sglang_reshard.testing import cpu_host
from support.http_engine import HttpEngine

PROMPTS = [[5, 6, 7, 8], [100, 200], [300, 17, 44, 9, 2]]
NEW_TOKENS = 8
SAMPLING = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}


class Server:
    def __init__(self, folder: Path, tp_size: int, url: str, transport: str) -> None:
        self._folder, self._tp_size, self._url = folder, tp_size, url
        self._sender = WeightSender(url, timeout_s=90, transport=transport)

    def update(self, model: nn.Module, version: str) -> UpdateReport:
        return self._sender.update(model, weight_version=version, verify="full")

    def tokens(self) -> list[list[int]]:
        if dist.get_rank():
            return []
        body = {"input_ids": PROMPTS, "sampling_params": SAMPLING}
        return [answer["output_ids"] for answer in httpx.post(f"{self._url}/generate", json=body, timeout=60).json()]

    def digests(self, version: str) -> list[Any]:
        if dist.get_rank():
            return []
        engine = HttpEngine(self._url.removeprefix("http://"), self._tp_size)
        return read_live_digests(engine, self._folder / f"digests-{version}")

    def close(self) -> None:
        self._sender.close()


class Embedded:
    """Started by the trainer on all of its hosts, with no interface given."""

    def __init__(self, folder: Path, tp_size: int) -> None:
        cpu_host.activate(tp_size)
        ranks = dist.get_world_size()
        self._engine = VerlEngine(
            init_device_mesh("cpu", (ranks,)),
            ranks // int(os.environ["LOCAL_WORLD_SIZE"]),
            timeout_s=90,
            model_path=str(folder / "model"),
            load_format="dummy",
            skip_tokenizer_init=True,
            dist_init_addr=f"{os.environ['MASTER_ADDR']}:25000",
            log_level="warning",
            **cpu_host.engine_arguments(tp_size=tp_size, dtype="float32"),
        )

    def update(self, model: nn.Module, version: str) -> UpdateReport:
        return self._engine.update_weights_from_tensor(model, weight_version=version, verify="full")

    def tokens(self) -> list[list[int]]:
        outputs = self._engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)
        return [output["output_ids"] for output in outputs]

    def digests(self, _version: str) -> list[Any]:
        """None: SGLang itself sends tensors to engine ranks by memory that they share, so to one host only."""
        return []

    def close(self) -> None:
        self._engine.shutdown()


def main(folder: Path, tp_size: int, where: str, transport: str, last: str = "") -> None:
    """`last`: the last update is the last thing that is done to the engine; what it holds is not looked at."""
    dist.init_process_group("cpu:gloo")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "model")
    model = fully_shard(Qwen3ForCausalLM(config).float())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    engine = Embedded(folder, tp_size) if where == "embedded" else Server(folder, tp_size, where, transport)
    seen = []
    for version in ("1", "2"):
        tokens = torch.arange(24).view(2, 12) + dist.get_rank()
        model(input_ids=tokens, labels=tokens).loss.backward()
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
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
