"""One engine rank of one checkpoint examined: built, traced, carried out, and held against stock `load_weights`."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from drafts import sent_with_draft, with_draft
from layout_kinds import layout_kinds
from sglang_reshard.cli.plan.sglang_model import build_rank, choose_code_paths, import_before_forks
from sglang_reshard.derived.live_signature import LiveSignature
from sglang_reshard.errors import ReshardError, Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.patches import repacking
from sglang_reshard.selftest.digests import digests
from sglang_reshard.trace.live import live_tensors, storage_key
from sglang_reshard.trace.live_shards import live_shards
from sglang_reshard.trace.program import Copy, Program
from sglang_reshard.trace.stock_load import EngineStart
from sglang_reshard.trace.tracer import trace
from support.checkpoints import read_weights
from support.live_memory import differing, fill_with_garbage
from support.sglang_state import published_arguments
from tools.oracle.replay import replay

Weights = dict[str, torch.Tensor]
Start = Callable[[], EngineStart] | None
VERL_FOLDER = "SGLANG_RESHARD_TEST_VERL"  # of another environment, if this one has no verl
# What the trace says of an engine that has never loaded a checkpoint.
_LOAD_ONCE = "load a checkpoint from disk once first"
_NEVER_WRITTEN = "is not written by the loader at all"
_MADE_ONCE = "the first load makes "


@dataclasses.dataclass(frozen=True)
class Finding:
    """What came of one engine rank.

    passed   the program leaves the bytes that stock loading leaves, and all checks held
    refused  the trace refuses, by our error in `why`, what stock SGLang loads
    cannot   stock SGLang does not build it on this host, or does not load it: its error in `why`
    failed   something that must never be; `why` says what

    has      kinds of layout that it covers
    copies   of the traced program
    unread   tensors for modules of this stage of a pipeline, which its loader skips: an update is refused if all do
    """

    outcome: str
    why: str = ""
    has: tuple[str, ...] = ()
    copies: int = 0
    unread: tuple[str, ...] = ()


def examine(
    folder: str,
    *,
    weights_dtype: str | None = None,
    gpu: bool = True,
    draft: bool = False,
    unsent: str = "",
    **build: Any,
) -> Finding:
    """Examine one engine rank that started on the checkpoint in `folder`.

    draft   the checkpoint is for a draft as well, which is built and loaded with its target
    unsent  tensors with this in their name are in the checkpoint, and no update sends them
    """
    try:
        model = built(folder, gpu, build)
        if draft:
            model = with_draft(model, folder)
    except (Exception, SystemExit) as error:
        return Finding("cannot", said(error, folder))
    weights = sent_with_draft(folder) if draft else read_weights(folder)
    if weights_dtype is not None:
        weights = {n: t.to(getattr(torch, weights_dtype)) if t.dtype.itemsize > 1 else t for n, t in weights.items()}
    config = json.loads((Path(folder) / "config.json").read_text())
    started_on, stages = specs_of(weights), build.get("pp_size", 1)
    if unsent:
        weights = {name: tensor for name, tensor in weights.items() if unsent not in name}
    try:
        found = _examined(model, weights, started_on, config, folder, stages)
        if (found.outcome == "refused" and _LOAD_ONCE in found.why) or found.why.startswith(_MADE_ONCE):
            # The stock load that ended the examination was the engine's start from a checkpoint.
            once = _examined(model, weights, started_on, config, folder, stages)
            found = once if once.outcome == "failed" else dataclasses.replace(once, why=once.why or found.why)
    except Exception as error:
        return Finding("failed", said(error, folder))
    return found


def built(folder: str, gpu: bool, build: dict[str, Any]) -> torch.nn.Module:
    # Else torch says of a model that needs a GPU that this process is a fork, not that there is none.
    vars(torch.cuda)["_lazy_init"] = _no_gpu
    if not gpu:
        return build_rank(folder, **build)
    try:
        return build_rank(folder, attention_backend="triton", **build)
    except AssertionError as error:
        # Every backend is refused by some models; SGLang checks it before anything is built.
        if "attention backend" not in str(error):
            raise
        return build_rank(folder, attention_backend="torch_native", **build)


def begin(ranks: int, *, gpu: bool = True) -> None:
    """Prepares a script that examines engine ranks in forks, by the code paths of a GPU or of a CPU."""
    choose_code_paths(ranks, gpu=gpu)
    torch.set_num_threads(1)
    import_before_forks()


def remember_modules() -> None:
    """As the plugin does in an engine."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_loader.loader._initialize_model", repacking.remember, HookType.AFTER)
    HookRegistry.apply_hooks()


def started_on(folder: Path) -> torch.nn.Module:
    """The engine rank that was built last, as SGLang's own loader leaves it when it starts on the checkpoint there."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model

    config = ModelConfig.from_server_args(published_arguments())
    config.model_path = str(folder)
    load_config, device = LoadConfig(load_format="auto"), DeviceConfig("cpu", 0)
    return get_model(model_config=config, load_config=load_config, device_config=device)


def _no_gpu() -> None:
    raise RuntimeError("there is no GPU on this host")


def _examined(
    model: torch.nn.Module,
    weights: Weights,
    started_on: list[TensorSpec],
    config: dict[str, Any],
    folder: str,
    stages: int,
) -> Finding:
    fill_with_garbage(model)
    before, signature, paths = digests(model), LiveSignature(model).current(), _paths(model)
    program, refusal, start = *_traced(model, weights), None
    unread: tuple[str, ...] = ()
    if program is None and _NEVER_WRITTEN in refusal and "scale" not in refusal.partition(" ")[0]:
        # An engine knows its own checkpoint, and what a start on it leaves alone.
        start = functools.partial(EngineStart, started_on)
        again, why = _traced(model, weights, start)
        misnamed = _misnamed(again, weights) if again is not None else ()
        if again is None or (again.copies and (stages > 1 or not misnamed)):
            program, refusal, unread = again, why, misnamed
    wrote = differing(before, digests(model))
    complaints = [f"the trace wrote to {', '.join(wrote[:4])}"] if wrote else []
    complaints += [] if program is None else _missing_scales(model, weights, program, start)
    replays = None if program is None else Replays.of(model, program, weights)
    complaints += [] if LiveSignature(model).current() == signature else [_moved(model, paths)]
    stock = _stock(model, weights)
    if not isinstance(stock, Exception):
        complaints += _unjustified(refusal, before, stock) if replays is None else replays.complaints(stock)
    if program is not None and not complaints and not isinstance(stock, Exception):
        complaints += _quantized_on_arrival(model, weights, start)
    if complaints:
        return Finding("failed", "; ".join(complaints))
    if isinstance(stock, Exception):
        return Finding("cannot", said(stock, folder))
    if program is None:
        return Finding("refused", refusal)
    has = tuple(sorted(layout_kinds(config, weights, program)))
    why = ""
    if left := program.left_alone:
        more = f" and {len(left) - 1} more as they are" if len(left) > 1 else " as it is"
        why = f"a start on the checkpoint leaves {left[0]}{more}, too"
    return Finding("passed", why, has=has, copies=len(program.copies), unread=unread)


def _misnamed(program: Program, weights: Weights) -> tuple[str, ...]:
    """The tensors of the checkpoint for modules of which something is left alone, and which the loader skips.

    An update would be refused for the tensor that nobody reads. (Of a pipeline, another stage may read it.)
    """
    read = {copy.source for copy in program.copies}
    modules = {name.rpartition(".")[0] for name in program.left_alone}
    return tuple(sorted(name for name in weights.keys() - read if any(module in name for module in modules)))


def _paths(model: torch.nn.Module) -> dict[str, int]:
    return {name: storage_key(tensor) for name, tensor in live_tensors(model)}


def _moved(model: torch.nn.Module, before: dict[str, int]) -> str:
    after = _paths(model)
    made = [name for name in after if name not in before]
    only_made = bool(made) and all(after.get(name) == key for name, key in before.items())
    return f"{_MADE_ONCE}{made[0]}" if only_made else "live tensors have moved"


def _unjustified(refusal: str, garbage: dict[str, str], stock: dict[str, str]) -> list[str]:
    """What the trace says that the loader never writes must be the garbage of before after stock loading."""
    name, _, what = refusal.partition(" ")
    if what.startswith(_NEVER_WRITTEN) and stock[name] != garbage[name]:
        return [f"stock loading writes {name}, and the trace refuses it as never written"]
    return []


def specs_of(weights: Weights) -> list[TensorSpec]:
    return [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()]


def _traced(model: torch.nn.Module, weights: Weights, start: Start = None) -> tuple[Program | None, str]:
    """The program, and why the trace refused."""
    try:
        return trace(model, specs_of(weights), start), ""
    except ReshardError as error:
        return None, str(error)


def _missing_scales(model: torch.nn.Module, weights: Weights, program: Program, start: Start) -> list[str]:
    """What is wrong with how the trace takes weights without a scale that this rank reads, or without any."""
    scales = sorted({copy.source for copy in program.copies if copy.source.endswith(("_scale", "_scale_inv"))})
    found = []
    for left_out in filter(None, (scales, scales[len(scales) // 2 :][:1])):
        program, refusal = _traced(model, {name: t for name, t in weights.items() if name not in left_out}, start)
        if program is not None or "scale" not in refusal:
            found.append(f"without {left_out[0]} and {len(left_out) - 1} more scales the trace says: {refusal!r}")
    return found


def _quantized_on_arrival(model: torch.nn.Module, weights: Weights, start: Start) -> list[str]:
    """What differs after an update in bfloat16 from stock loading of what verl's quantizer makes of its weights."""
    names = [name for name, tensor in weights.items() if tensor.dtype == torch.float8_e4m3fn]
    if not names:
        return []
    trained = {name: t for name, t in weights.items() if not name.endswith("_scale_inv")}
    generator = torch.Generator().manual_seed(3)
    for name in names:
        trained[name] = torch.randn(weights[name].shape, generator=generator).to(torch.bfloat16)
    program, refusal = _traced(model, trained, start)
    if program is None:
        return [f"in bfloat16 it is refused: {refusal}"]
    fill_with_garbage(model)
    replay(program, trained)
    found = digests(model)
    quantize = verl_quantizer()
    loaded = dict(trained)
    for name in names:
        loaded[name], scales = quantize(trained[name], (128, 128))
        loaded[f"{name}_scale_inv"] = scales.squeeze(-1)
    stock = _stock(model, loaded)
    if isinstance(stock, Exception):
        return [f"stock SGLang does not load what verl quantizes: {stock}"]
    wrong = differing(found, stock)
    return [f"in bfloat16 {len(wrong)} live tensors differ: {', '.join(wrong[:4])}"] if wrong else []


@functools.cache
def verl_quantizer() -> Any:
    """verl's own, in torch, from its file: verl itself imports Ray."""
    (folder,) = importlib.util.find_spec("verl").submodule_search_locations  # type: ignore[union-attr, misc]
    file = Path(os.environ.get(VERL_FOLDER, folder)) / "utils" / "kernel" / "fp8_kernel.py"
    spec = importlib.util.spec_from_file_location("fp8_kernel", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._scaled_fp8_blockwise_pytorch


def _stock(model: torch.nn.Module, weights: Weights) -> dict[str, str] | Exception:
    """Digests after stock loading, without further paths that it makes to memory which had one (a cache by name)."""
    fill_with_garbage(model)
    paths = _paths(model)
    try:
        with torch.no_grad():
            model.load_weights(iter([(n, t.clone()) for n, t in weights.items()]))  # type: ignore[operator]
    except Exception as error:
        return error
    known = set(paths.values())
    again = {name for name, t in live_tensors(model) if name not in paths and storage_key(t) in known}
    return {name: digest for name, digest in digests(model).items() if name not in again}


@dataclasses.dataclass(frozen=True)
class Replays:
    """Digests after a replay, and after one without the copy to `left_out`, which `sharing` are paths to.

    misread  names of tensors that were not read back as they were copied
    """

    whole: dict[str, str]
    incomplete: dict[str, str]
    left_out: str
    sharing: set[str]
    misread: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: torch.nn.Module, program: Program, weights: Weights) -> Replays:
        def replayed(copies: tuple[Copy, ...]) -> dict[str, str]:
            fill_with_garbage(model)
            replay(dataclasses.replace(program, copies=copies), weights)
            return digests(model)

        middle = len(program.copies) // 2
        left_out = program.copies[middle].target
        key = storage_key(program.targets[left_out])
        # In this order: scratch memory keeps what the last replay has copied, and is read back from the whole one.
        incomplete = replayed(program.copies[:middle] + program.copies[middle + 1 :])
        return cls(
            incomplete=incomplete,
            whole=replayed(program.copies),
            misread=_misread(program, weights),
            left_out=left_out,
            # None for the operand of an expression, which is in no live storage.
            sharing={name for name, tensor in live_tensors(model) if storage_key(tensor) == key},
        )

    def complaints(self, stock: dict[str, str]) -> list[str]:
        if self.misread:
            return [f"{self.misread[0]}, read back from live memory, is not the checkpoint's"]
        wrong, noticed = differing(self.whole, stock), differing(self.incomplete, stock)
        found = [f"{len(wrong)} of {len(stock)} live tensors differ: {', '.join(wrong[:4])}"] if wrong else []
        # The comparison sees one copy less, and sees it where the copy lands.
        if not noticed or (self.sharing and not self.sharing.intersection(noticed)):
            found.append(f"a copy to {self.left_out} was left out and nothing noticed")
        return found


def _misread(program: Program, weights: Weights) -> tuple[str, ...]:
    """Names of checkpoint tensors of which `live_shards` finds other elements in live memory than were copied there.

    An engine whose loader computes in place cannot share all of its weights, and says so.
    """
    try:
        shards = live_shards(program, {name: tuple(tensor.shape) for name, tensor in weights.items()}, 0)
    except Unsupported:
        if any(step.description.startswith("from ") for step in program.steps):
            return ()
        raise
    read = {copy.source for copy in program.copies}
    wrong = [] if {shard.name for shard in shards} == read else sorted(read)
    for shard in shards:
        for part in shard.sharding.shard_map.shards:
            index = tuple(slice(a, a + n) for a, n in zip(part.local_start, part.box.shape, strict=True))
            held = shard.tensor[index].flatten().contiguous()
            wanted = weights[shard.name][part.box.slices()].flatten().contiguous().to(held.dtype)
            if not torch.equal(held.view(torch.uint8), wanted.view(torch.uint8)):
                wrong.append(shard.name)
    return tuple(wrong)


def said(error: BaseException, folder: str) -> str:
    """The error, in one line that is the same on every host."""
    frames = traceback.extract_tb(error.__traceback__)
    # The newest SGLang is in a folder of the environment, next to site-packages.
    inside = re.compile(r".*(?:/site-packages|/\.venv/\w+)/")
    where = next((f for f in reversed(frames) if inside.match(f.filename)), frames[-1])
    file = inside.sub("", where.filename).rsplit("/test/", 1)[-1]
    text = " ".join(str(error).split()).replace(folder, "the checkpoint")
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]} ({file}:{where.lineno})"
