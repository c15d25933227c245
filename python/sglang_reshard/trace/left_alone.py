"""Live tensors that an update does not write: which are refused, and which are as after a start on the checkpoint.

A parameter may be left alone where a start on the engine's own checkpoint leaves it alone too (`stock_load`). It then
gets the value that its constructor gave it, if the engine was started on dummy weights (`initial_values`). Persistent
buffers must be sent if a start would load them, and are as constructed otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.torch_private import persistent_buffers
from sglang_reshard.trace.geometry import Geometry
from sglang_reshard.trace.initial_values import InitialValues, kept_values
from sglang_reshard.trace.lazy_tensor import LiveStorage
from sglang_reshard.trace.live import flat_view, storage_key
from sglang_reshard.trace.program import Step
from sglang_reshard.trace.stock_load import StockLoad, source_names

_RESTART = "Start the engine on the checkpoint (load_format='auto'), by one of SGLang's own loaders, or send the tensor"


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """A parameter that an update does not write, or only in the range `written`, in elements of its storage."""

    name: str
    parameter: torch.Tensor
    written: tuple[Geometry, ...] = ()


def check_buffers(storages: Mapping[int, LiveStorage], written: Collection[LiveStorage], stock: StockLoad) -> list[str]:
    """Raises Unsupported, naming it, for a tensor that a start would load, and an update does not write.

    Returns the names of those that stay: by their own, or by those of the checkpoint's tensors that fill them.

    That is a persistent buffer. If one must be looked for in the engine's own checkpoint, attributes and other buffers
    that it fills are found, too. Also raises Unsupported for a persistent buffer that nobody loads, if the engine's
    start has randomized it.
    """
    model = stock.loader.model
    parameters = {storage_key(parameter) for parameter in model.parameters()}
    unwritten: dict[str, tuple[str, torch.Tensor]] = {}
    for name, buffer in persistent_buffers(model):
        storage = storages.get(storage_key(buffer))
        if buffer.numel() and storage is not None and storage not in written and storage_key(buffer) not in parameters:
            unwritten.setdefault(storage.name, (name, buffer))
    if not unwritten or getattr(model, "keeps_unsent", False):
        return []
    if stock.writes is None:
        tensors = {storage_name: buffer for storage_name, (_, buffer) in unwritten.items()}
        loaded = {name: [source] for name, source in stock.takes(tensors).items()}
    else:
        others = {s.name for key, s in storages.items() if key not in parameters and s not in written}
        loaded = {name: source_names(records) for name, records in stock.writes.items() if name in others}
    kept: list[str] = []
    for storage_name, sources in ((name, names) for name, names in loaded.items() if names):
        name = unwritten[storage_name][0] if storage_name in unwritten else storage_name
        if stock.stays(name) or stock.tensors_may_stay(sources):
            kept.append(name)
            continue
        unsure = f" (It is not known whether the model's checkpoint has it: {stock.unknown}.)" if stock.unknown else ""
        raise Unsupported(
            f"{name} is a buffer that the loader fills from {sources[0]}, which was not sent: named_parameters() has "
            f"no buffers. Pass model.state_dict().items(), or the module itself, which have them.{unsure}"
        )
    for name, buffer in unwritten.values():
        if buffer.is_floating_point() and _within(model, name, stock.randomized):
            raise Unsupported(
                f"{name} is a buffer that no tensor of the checkpoint reaches, and the engine's start on dummy weights "
                f"has overwritten it with random values. {_RESTART}"
            )
    return kept


def restoring_steps(model: torch.nn.Module, left: Sequence[LeftAlone], stock: StockLoad) -> list[Step]:
    """Returns the step that gives parameters their initial values once, where a dummy start has overwritten them.

    Raises Unsupported, naming the parameter, where the initial value is not known and matters, see `initial_values`.
    """
    found: list[tuple[LeftAlone, torch.Tensor]] = []
    named = model.named_modules() if left else ()  # each model that SGLang has built has initial values
    roots = [(path, values) for path, module in named if (values := kept_values(module)) is not None]
    for one in left:
        if not one.parameter.is_floating_point():  # these are not randomized
            continue
        if _within(model, one.name, stock.randomized):
            raise _unknown(one.name)
        for root, values in roots:
            prefix = f"{root}." if root else ""
            if one.name.startswith(prefix) and (initial := _initial(model, one, prefix, values)) is not None:
                found.append((one, initial))
    return [Step(found[0][0].name, "initial values", partial(_restore, found))] if found else []


def _initial(model: torch.nn.Module, one: LeftAlone, root: str, values: InitialValues) -> torch.Tensor | None:
    """Returns the value to be restored; None if it is undefined in an engine started on the checkpoint, too."""
    name = one.name.removeprefix(root)
    if name not in values:  # SGLang wraps layers that LoRA adapters are for once the model is loaded
        name = name.replace(".base_layer.", ".")
    initial = values.get(name)
    if initial is None:
        owner = model.get_submodule(one.name.rpartition(".")[0])
        if getattr(owner, "quant_method", None) is None:
            raise _unknown(one.name)
        return None
    if initial.dim() and initial.shape != one.parameter.shape:
        raise _unknown(one.name)
    if not bool(initial.float().isfinite().all()):  # no constructor has written that: it is uninitialised memory
        return None
    return initial


def _restore(values: list[tuple[LeftAlone, torch.Tensor]]) -> None:
    """Writes initial values to the elements that updates leave alone, and forgets them."""
    for one, initial in values:
        live = one.parameter
        value = initial.to(live.device).expand(live.shape)
        if one.written:
            loaded = torch.zeros(len(flat_view(live, live.dtype)), dtype=torch.bool, device=live.device)
            for geometry in one.written:
                loaded.as_strided(geometry.size, geometry.stride, geometry.offset).fill_(True)
            of_live = loaded.as_strided(live.shape, live.stride(), live.storage_offset())
            value = torch.where(of_live, live, value)
        live.copy_(value)
    values.clear()


def _within(model: torch.nn.Module, name: str, roots: Sequence[torch.nn.Module]) -> bool:
    named = model.named_modules() if roots else ()
    paths = (path for path, module in named if any(module is root for root in roots))
    return any(not path or name.startswith(f"{path}.") for path in paths)


def _unknown(name: str) -> Unsupported:
    return Unsupported(
        f"{name} is not written by the loader at all. A start on the engine's checkpoint leaves it as it was "
        f"constructed, but this engine's start on dummy weights has overwritten that. {_RESTART}"
    )
