"""Refuses an update that keeps the values of a quantized weight and replaces its scales, or the reverse."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.shown_names import some_names
from sglang_reshard.trace.kept import split_part
from sglang_reshard.trace.lazy_tensor import LiveStorage, Record
from sglang_reshard.trace.live import storage_key
from sglang_reshard.trace.stock_load import StockLoad, copies_of, source_names

# What does not depend on the weight's values, or that they do not depend on.
_INDEPENDENT = ("bias", "input_scale", "input_global_scale", "weight_shape")


def check_quantized(
    model: torch.nn.Module,
    storages: dict[int, LiveStorage],
    records: Sequence[Record],
    kept: Collection[str],
    stock: StockLoad,
) -> None:
    """Raises Unsupported if a tensor of a quantized checkpoint module is kept, and another one of it is written.

    kept  names of parameters, and of parts, that stay
    """
    written: dict[LiveStorage, list[Record]] = defaultdict(list)
    for record in copies_of(records):
        written[record.storage].append(record)
    modules = dict(model.named_modules())
    for one in kept:
        name, part = split_part(one)
        module = modules.get(name.rpartition(".")[0])
        if module is None or not any(map(_is_quantized, dict(_tensors(module)).values())):
            continue
        siblings = {
            storages[key]: other
            for other, tensor in _tensors(module)
            if (key := storage_key(tensor)) in storages and not other.endswith(_INDEPENDENT)
        }
        if written.keys().isdisjoint(siblings) or name.endswith(_INDEPENDENT):
            continue
        own = [storage.name for storage, other in siblings.items() if other == name.rpartition(".")[2]]
        fills = stock.fills(own[0]) if own and not part else ()
        of = {source.rpartition(".")[0] for source in ([part] if part else source_names(fills or ()))}
        changed = [
            source
            for storage in siblings
            for source in source_names(written.get(storage, ()))
            if not source.endswith(_INDEPENDENT) and (not of or source.rpartition(".")[0] in of)
        ]
        if changed:
            raise Unsupported(
                f"{one} may not stay as it is, because the update replaces "
                f"{some_names(list(dict.fromkeys(changed)))} of the same quantized weight. Send its values and its "
                "scales together, or let frozen= keep all of them."
            )


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _is_quantized(tensor: torch.Tensor) -> bool:
    """Returns whether it has packed or 8-bit numbers."""
    if tensor.dtype in (torch.bool, torch.int64):  # masks and indices
        return False
    return tensor.dtype.itemsize == 1 or not (tensor.is_floating_point() or tensor.is_complex())
