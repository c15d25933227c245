"""Computes digests of all live tensors of a model, in this process or on every rank of a live engine.

SGLang accepts the name of a custom weight loader. `write_live_digests` is one: the single tensor that it is sent
carries, as bytes, the folder to write to. This works with any live engine, without a change to it:

    engine = sglang.Engine(..., custom_weight_loader=[LOADER])
    read_live_digests(engine, folder)        # [{path: digest}, ...], one per TP rank
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sglang_reshard.errors import EngineRefused
from sglang_reshard.trace.live import live_tensors

LOADER = "oracle.digests.write_live_digests"


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
    """A custom weight loader: every rank writes `<folder>/<tp rank>.json` and loads nothing."""
    write_json(digests(model), named_tensors)


def write_json(found: Any, named_tensors: Any) -> None:
    """Writes what a custom weight loader has found on this rank to where `read_live_digests` reads it."""
    from sglang.srt.distributed import get_tp_group

    ((_, folder),) = list(named_tensors)
    path = Path(bytes(folder.cpu().tolist()).decode()) / f"{get_tp_group().rank_in_group}.json"
    # Renamed into place, so that a reader never sees half a file.
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    os.replace(partial, path)


def read_live_digests(engine: Any, folder: str | Path, loader: str = LOADER) -> list[Any]:
    """Returns the digests of every TP rank of an `sglang.Engine` that was started with `loader` allowed.

    loader  `LOADER`, or another custom weight loader that calls `write_json`
    The folder must be on the engine's host; earlier files there are replaced.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    message = torch.tensor(list(str(folder.resolve()).encode()), dtype=torch.uint8)
    with _session(engine):
        ok, reason = engine.update_weights_from_tensor([("folder", message)], load_format=loader, flush_cache=False)
    if not ok:
        raise EngineRefused(f"The engine wrote no digests: {reason}. Start it with custom_weight_loader=['{loader}'].")
    tp_size = engine.server_args.tp_size
    missing = [rank for rank in range(tp_size) if not (folder / f"{rank}.json").exists()]
    if missing:
        raise EngineRefused(f"No digests of the engine's TP ranks {missing} in {folder}: is it on this host?")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(tp_size)]


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
