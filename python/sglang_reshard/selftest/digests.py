"""Computes digests of all live tensors of a model, in this process or on every rank of a live engine.

SGLang accepts the name of a custom weight loader. `write_live_digests` is one: the single tensor that it is sent
carries, as bytes, the folder to write to. This works with any live engine, without a change to it:

    engine = sglang.Engine(..., custom_weight_loader=[LOADER])
    read_live_digests(engine, folder)        # [{path: digest}, ...], one per engine rank
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard.errors import EngineRefused
from sglang_reshard.trace.live import live_tensors

LOADER = "sglang_reshard.selftest.digests.write_live_digests"
# Of every engine rank: path of a live tensor -> digest.
Digests = list[dict[str, str]]
_LATER_STAGES_S = 10.0  # after the first pipeline stage, which answers


def digests(model: torch.nn.Module) -> dict[str, str]:
    """Returns the blake2b digest of every parameter, buffer and tensor attribute, by path."""
    return {
        name: digest(tensor)
        for name, tensor in live_tensors(model)
        if tensor.device.type != "meta" and tensor.layout is torch.strided
    }


def digest(tensor: torch.Tensor) -> str:
    """Returns the digest of a tensor's dtype, shape and elements in row-major order."""
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    elements = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(elements.numpy().tobytes(), key=hashlib.sha256(head).digest()).hexdigest()[:32]


def write_live_digests(model: torch.nn.Module, named_tensors: Any) -> None:
    """A custom weight loader: every rank writes its file in the folder and loads nothing."""
    write_json(digests(model), named_tensors)


def write_json(found: Any, named_tensors: Any) -> None:
    """Writes the findings of a custom weight loader on this rank, for `read_live_digests`."""
    ((_, folder),) = list(named_tensors)
    # Data parallel engines have a rank of each number, in a process of its own.
    name = f"{dist.get_rank()}-{os.getpid()}.json"
    path = Path(bytes(folder.cpu().tolist()).decode()) / name
    # Renamed into place, so that a reader never sees half a file.
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    os.replace(partial, path)


def read_live_digests(engine: Any, folder: str | Path, loader: str = LOADER) -> list[Any]:
    """Returns the digests of every rank of an `sglang.Engine` that was started with `loader` allowed.

    By tensor parallel rank within the pipeline stage; of data parallel engines first all ranks 0, then all ranks 1.

    loader  `LOADER`, or another custom weight loader that calls `write_json`
    The folder must be on the engine's host; earlier files there are replaced.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    message = torch.tensor(list(str(folder.resolve()).encode()), dtype=torch.uint8)
    arguments = engine.server_args
    replicas = 1 if arguments.enable_dp_attention else arguments.dp_size
    ranks = replicas * arguments.pp_size * arguments.tp_size
    with _session(engine):
        if ranks == arguments.tp_size:
            ok, reason = engine.update_weights_from_tensor([("folder", message)], load_format=loader, flush_cache=False)
        else:
            ok, reason = _ask_all(engine, message, loader)
    if not ok:
        raise EngineRefused(f"The engine wrote no digests: {reason}. Start it with custom_weight_loader=['{loader}'].")
    return written_by(ranks, folder)


def written_by(ranks: int, folder: Path) -> list[Any]:
    """Returns what so many ranks have written to the folder with `write_json`, in their order."""
    deadline = time.monotonic() + _LATER_STAGES_S
    while len(written := list(folder.glob("*.json"))) < ranks:
        if time.monotonic() > deadline:
            raise EngineRefused(f"{len(written)} of the engine's {ranks} ranks wrote digests to {folder}: this host's?")
        time.sleep(0.01)
    return [json.loads(file.read_text()) for file in sorted(written, key=lambda file: int(file.name.split("-")[0]))]


def _ask_all(engine: Any, message: torch.Tensor, loader: str) -> tuple[bool, str]:
    """Asks data parallel ranks and pipeline stages. SGLang's own method refuses, and its handles can be opened once."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    by_value = [pickle.dumps([("folder", message)])] * engine.server_args.tp_size
    request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=by_value, load_format=loader, flush_cache=False)
    ask = engine.tokenizer_manager.update_weights_from_tensor_communicator(request)
    outputs = engine.loop.run_until_complete(ask)
    return all(output.success for output in outputs), outputs[0].message


@contextmanager
def _session(engine: Any) -> Iterator[None]:
    """From 0.5.21 SGLang accepts tensors only between these two calls, which leave unquantized weights unchanged."""
    if not hasattr(engine, "begin_weight_update"):
        yield
        return
    ok, reason = engine.begin_weight_update(selector="target")
    if not ok:
        raise EngineRefused(f"The engine opened no weight-update session: {reason}.")
    try:
        yield
    finally:
        engine.end_weight_update()


def differing(live: Digests, reference: Digests) -> list[str]:
    """Returns the live tensors that are not as in the reference, or that only one of them has: "engine rank: path"."""
    nothing: dict[str, str] = {}
    return [
        f"{rank}: {path}"
        for rank, (mine, theirs) in enumerate(zip_longest(live, reference, fillvalue=nothing))
        for path in sorted(mine.keys() | theirs.keys())
        if mine.get(path) != theirs.get(path)
    ]
