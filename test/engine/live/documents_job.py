"""What two trainer ranks do for test_documents_run.py: they run Python blocks of documents as they are printed.

A block is (document, its line there, its text). Each function returns those that it has run.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoConfig, AutoTokenizer

from sglang_reshard import ModuleReceiver, ModuleSender, Probe, RemoteEngine, ReshardPlan, VerlEngine, WeightSender
from sglang_reshard.cli.layouts import Source
from sglang_reshard.selftest.trainer import Trainer
from support.typed_blocks import ASSUMED, ELSEWHERE, names_used

Block = tuple[str, int, str]
Names = dict[str, Any]
_OF_TRAINERS = ("sender", "VerlEngine", "group")  # a block with a server and without these is a client's, who is alone


@cache
def _imported() -> Names:
    imported: Names = {}
    exec(ASSUMED, imported)
    return imported


def _run(block: Block, given: Names) -> Names | None:
    """Returns the block's names after it has run, or None if it uses one that is not given."""
    document, line, body = block
    names = _imported() | given
    used = {name: ELSEWHERE.get((document, name), name) for name in names_used(body)}
    if not names.keys() >= set(used.values()):
        return None
    names |= {name: names[there] for name, there in used.items()} | {"__name__": "block"}
    if dist.get_rank() == 0 or "RemoteEngine(" not in body or any(word in body for word in _OF_TRAINERS):
        try:
            exec(compile("\n" * (line - 1) + body, document, "exec"), names)
        except BaseException as error:
            raise AssertionError(f"{document}:{line}: {type(error).__name__}: {error}") from error
    return names


def _ran_and_closed(block: Block, given: Names) -> bool:
    names = _run(block, given)
    kept = {id(value) for value in given.values()}  # a block may have one by another name
    for value in (names or {}).values():
        if id(value) not in kept and isinstance(value, WeightSender | ModuleSender | VerlEngine):
            value.shutdown() if isinstance(value, VerlEngine) else value.close()
    return names is not None


def of_servers(blocks: Sequence[Block], job: dict[str, Any]) -> list[Block]:
    """Runs what a trainer and two servers give the names of."""
    key, (url, other_url) = job["key"], job["urls"]
    os.environ |= {"SERVER_URLS": url, "SGLANG_RESHARD_ADMIN_API_KEY": key}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    trainer = Trainer(AutoConfig.from_pretrained(job["model"]), Source(fsdp=2))
    model = trainer.model
    policy = nn.Module()
    policy.actor = model
    sender, other = (WeightSender(of, admin_api_key=key) for of in (url, other_url))
    for each in (sender, other):
        each.update(model)  # so that replicas have something to pull
    given = {
        "key": key, "other_key": key, "url": url, "rank": dist.get_rank(), "ranks": 2, "steps": 2,
        "group": dist.group.WORLD, "mesh": mesh, "model": model, "policy": policy, "stage": model, "sender": sender,
        "engine": RemoteEngine(url, admin_api_key=key), "probe": Probe([[1, 2, 3]], logprobs=model),
        "verl_engine": VerlEngine(device_mesh_cpu=mesh["tp"], backend="server", url=url, admin_api_key=key),
        "train": lambda model: trainer.step(), "train_step": lambda model: trainer.step(),
        "train_one_step": trainer.step, "train_next_step": trainer.step, "prompts": [[5, 6, 7]], "prompt": "The",
        "to_checkpoint_name": lambda name: name.removeprefix("actor."),
        "tokenizer": AutoTokenizer.from_pretrained(job["model"]),
    }  # fmt: skip
    ran = []
    for number, block in enumerate(blocks):
        sender.update(model, weight_version=f"before {number}")  # blocks repeat a version, which an engine refuses
        if _ran_and_closed(block, given):
            ran.append(block)
    for each in (sender, other):
        each.close()
    given["verl_engine"].shutdown()
    return ran


def of_meshes(blocks: Sequence[Block], job: dict[str, Any]) -> list[Block]:
    """Runs what copies between two modules of these ranks."""
    config = AutoConfig.from_pretrained(job["model"])
    actor, generation = (Trainer(config, layout).model for layout in (Source(fsdp=2), Source(tp=2)))
    reload = ReshardPlan.make(source=actor, target=generation, group=dist.new_group())
    given = {"actor": actor, "generation": generation, "reference": generation, "reload": reload, "steps": 2,
             "train": lambda model: None, "batch": None, "score": lambda batch: None}  # fmt: skip
    return [block for block in blocks if _ran_and_closed(block, given)]


class _Collecting:
    """True until a rollout has weights."""

    def __init__(self) -> None:
        self._seen = False

    def rollout(self, policy: nn.Module, version: str | None) -> None:
        self._seen = version is not None

    def __bool__(self) -> bool:
        return not self._seen


def _receive(blocks: Sequence[Block], module: nn.Module, metadata: str) -> None:
    """Runs a receiver's blocks, and takes the update that is left."""
    collecting = _Collecting()
    given = {"policy": module, "model": module, "metadata": metadata, "collecting": collecting}
    names: Names | None = given | {"rollout": collecting.rollout}
    for block in blocks:
        names = _run(block, names or {})
    assert names is not None
    names["receiver"].receive(60)
    names["receiver"].close()


def of_receivers(blocks: Sequence[Block]) -> list[Block]:
    """Runs what updates plain modules, with two receivers in threads of trainer rank 0, which run the page's blocks."""
    ran = []
    for block in blocks:
        document, _, body = block
        theirs = [b for b in blocks if b[0] == document and "receiver" in b[2] and "sender" not in b[2]]
        if "start_" not in body or not theirs:
            continue
        threads: list[threading.Thread] = []

        def start(metadata: str, theirs: Any = theirs, threads: Any = threads) -> None:
            for _ in range(2 if dist.get_rank() == 0 else 0):
                threads.append(threading.Thread(target=_receive, args=(theirs, nn.Linear(8, 8), metadata)))
                threads[-1].start()

        given = {"start_receivers": start, "start_collectors": start, "model": nn.Linear(8, 8), "steps": 2}
        if _ran_and_closed(block, given | {"train": lambda model: None}):
            ran += [block, *theirs]
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    return ran


def _named_in(body: str) -> nn.Module:
    """A module of zeros with the tensors that the block lists shards of."""

    def linear(rows: int = 64) -> nn.Module:
        return nn.Linear(32, rows, bias=False).requires_grad_(False)

    if "o_proj" in body:
        module = nn.ModuleDict({"o_proj": linear()})
    elif "experts" in body:
        module = nn.ModuleDict({"experts": nn.ModuleList(nn.ModuleDict({"up_proj": linear()}) for _ in range(2))})
    elif "gate_proj" in body:
        module = nn.ModuleDict({"gate_proj": linear(), "up_proj": linear()})
    else:
        module = nn.ModuleDict({"q_proj": linear(), "k_proj": linear(16)})
    for parameter in module.parameters():
        parameter.zero_()
    return module


def of_shards(blocks: Sequence[Block]) -> list[Block]:
    """Runs what says which shards there are: they are ones, and arrive in a module."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    shards = {
        "tensor": distribute_tensor(torch.ones(2, 64, 32), mesh, [Shard(0)]), "piece": torch.ones(1280),
        "local_tensor": torch.ones(16 if rank else 48, 32), "rank": rank, "ranks": 2,
    }  # fmt: skip
    ran = []
    for block in blocks:
        used = names_used(block[2])
        if used.isdisjoint({"tensor", "piece", "local_tensor"}):
            continue
        if "Conversion(" in block[2]:  # as many rows on each rank
            shards["local_tensor"] = torch.ones(64, 32)
        ran.append(block)
        if "sender" not in used:
            assert _run(block, shards)
            continue
        module, sender = _named_in(block[2]), ModuleSender()
        receiver = ModuleReceiver(module)
        if rank == 0:
            receiver.init(sender.metadata)
            receiver.start()
        sender.wait_for_receivers(1)
        assert _run(block, shards | {"sender": sender})
        assert rank or all(bool((parameter == 1).all()) for parameter in module.parameters())
        receiver.close()
        sender.close()
    return ran


def run_all(job: dict[str, Any]) -> list[str]:
    """Returns the blocks that have run, as DOCUMENT:LINE."""
    blocks = [tuple(block) for block in json.loads(Path(job["file"]).read_text())]
    ran = of_servers(blocks, job) + of_meshes(blocks, job) + of_receivers(blocks) + of_shards(blocks)
    return [f"{document}:{line}" for document, line, _ in ran]
