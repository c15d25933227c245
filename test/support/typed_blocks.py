"""The Python blocks of documents as modules that mypy checks, with the names that the text around them assumes.

A block keeps its line numbers: mypy's messages name the document and the line in it.
"""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.documents import ROOT, numbered_blocks, text

_GENERATED = re.compile(r"^<!-- (\w+): begin -->$.*?^<!-- \1: end -->$", re.M | re.S)
_ELLIPSIS = re.compile(r"(?<![\w\"'.])\.\.\.(?![\w\"'.])")  # what the reader fills in
# A block needs no annotations, and does not ask whether there is what its text says there is.
_SETTINGS = """
# mypy: allow-untyped-defs, check-untyped-defs, no-strict-optional
# mypy: disable-error-code="var-annotated,list-item,has-type"
"""
# What the text around a block assumes. `given` stands for an ellipsis, which the reader replaces.
ASSUMED = """
from collections.abc import Callable, Sequence
from typing import Any

import rich as rich
import torch
import torch.distributed as dist
from sglang_reshard import (
    ModuleReceiver, ModuleSender, MultiEngineSender, ParameterStream, Probe, RemoteEngine, ReshardPlan, SenderOptions,
    SnapshotFollower, Snapshots, UpdateOptions, VerlEngine, WeightSender, first_not_finite, reshard,
)
from sglang_reshard.extras.diffusion.receiver import TransformerReceiver
from sglang_reshard.extras.vllm.engine import send_to
from sglang_reshard.layout.regions import Box
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.protocol.session import Session
from sglang_reshard.sources import (
    Conversion, ExplicitSharding, FlatBuffer, FlatMember, FusedSlice, FusedTensor, ShardMap, TracedParameters,
    adapter_config, adapter_tensors, base_tensors, checkpoint_tensors, megatron_adapter_config,
    megatron_adapter_tensors,
)

given: Any
key: str
other_key: str
url: str
metadata: str
rank: int
ranks: int
steps: int
collecting: bool
group: dist.ProcessGroup
mesh: dist.device_mesh.DeviceMesh
model: torch.nn.Module
policy: torch.nn.Module
actor: torch.nn.Module
generation: torch.nn.Module
reference: torch.nn.Module
language_model: torch.nn.Module
gemma4: torch.nn.Module
experts: torch.nn.Module
of_this_rank: list[Conversion]
stage: torch.nn.Module
tensor: torch.Tensor
local_tensor: torch.Tensor
piece: torch.Tensor
target: Sequence[tuple[str, torch.Tensor]]
draft: Sequence[tuple[str, torch.Tensor]]
parameters: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]
prompt: str
prompts: list[list[int]]
sender: WeightSender
adapter: WeightSender
engine: RemoteEngine
server: RemoteEngine
prefill: RemoteEngine
decode: RemoteEngine
verl_engine: VerlEngine
receiver: ModuleReceiver
reload: ReshardPlan
probe: Probe
shared: Sequence[Any]
request: DistributedUpdateWeightsReq
to_checkpoint_name: Callable[[str], str]
to_checkpoint: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
norms: Sequence[tuple[str, torch.Tensor]]
build_model: Callable[[], torch.nn.Module]
train: Callable[[torch.nn.Module], object]
train_step: Callable[[torch.nn.Module], object]
train_one_step: Callable[[], object]
train_next_step: Callable[[], object]
start_collectors: Callable[[str], object]
start_receivers: Callable[[str], object]
# Of other projects, which have no types.
rollout: Any
score: Any
batch: Any
listing: Any
tokenizer: Any
trainer: Any
state_dict_adapter: Any
prime_model: Any
peft_model: Any
models: Any
llm: Any
pipeline: Any
trainer_ranks: Any
"""
# (document, name) -> the name above that has this document's type
ELSEWHERE = {
    ("docs/usage/running-requests.md", "engine"): "verl_engine",
    ("docs/usage/lora.md", "model"): "peft_model",
    ("docs/reference/api.md", "policy"): "adapter",
}


def typed_blocks(document: str) -> Iterator[tuple[int, str]]:
    """Returns each block that a person has written, and the line of the document at which it begins."""
    return numbered_blocks(_GENERATED.sub(lambda found: "\n" * found[0].count("\n"), text(document)), "python")


def names_used(body: str) -> set[str]:
    """Returns the names that a block uses and does not define."""
    nodes = list(ast.walk(ast.parse(body)))
    names = {(node.id, isinstance(node.ctx, ast.Load)) for node in nodes if isinstance(node, ast.Name)}
    defined = {name for name, loaded in names if not loaded} | {n.arg for n in nodes if isinstance(n, ast.arg)}
    defined |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return {name for name, loaded in names if loaded} - defined - set(dir(builtins)) - {"__name__"}


def complaints(blocks: Sequence[tuple[str, int, str]], folder: Path) -> list[str]:
    """Returns what mypy, run once, says of blocks (document, line, body).

    Programs begin in line 1 and assume nothing.
    """
    (folder / "assumed.py").write_text(ASSUMED)
    for number, (document, line, body) in enumerate(blocks):
        before = [""] * (line - 1)
        body = _ELLIPSIS.sub("given", body) if before else body
        if before and (used := sorted(names_used(body))):
            named = ", ".join(f"{ELSEWHERE.get((document, name), name)} as {name}" for name in used)
            before[0] = f"from assumed import {named}"
        (folder / f"block_{number}.py").write_text("\n".join([*before, body, _SETTINGS]))
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", *map(str, folder.iterdir())]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    return [
        re.sub(r"^.*/block_(\d+)\.py", lambda found: blocks[int(found[1])][0], line) for line in ran.stdout.splitlines()
    ]
