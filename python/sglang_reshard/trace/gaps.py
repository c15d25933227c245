"""Finds what a trace does not write, or writes twice, and whether that may be so.

A loader may miss a tensor, load one twice or ignore a config key. Storages can be huge, so writes are compared as boxes
on a grid.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.shown_names import some_names
from sglang_reshard.trace.coverage import runs_cover
from sglang_reshard.trace.geometry import Geometry, IndexMap, TooFragmented, grid_shape, remainder, to_boxes
from sglang_reshard.trace.kept import engine_name, part_of, parts_of
from sglang_reshard.trace.kv_scales import is_default_scale
from sglang_reshard.trace.lazy_tensor import LiveStorage, Record, VersionedView, geometry_of, leaves
from sglang_reshard.trace.left_alone import LeftAlone, check_buffers, restoring_steps
from sglang_reshard.trace.live import storage_key
from sglang_reshard.trace.loader import Loaded, Loader
from sglang_reshard.trace.program import MayStay, Step
from sglang_reshard.trace.quantized_parts import check_quantized
from sglang_reshard.trace.stock_load import EngineStart, StockLoad, copies_of, source_names

if TYPE_CHECKING:
    from sglang_reshard.trace.repack import RepackedModule

_MAX_CELLS = 50_000_000

Place = tuple[slice, ...]


class Cells:
    """A grid that is cut along each dimension where a box of any view begins or ends.

    places  of each view: where its boxes are in an array of the cells
    """

    def __init__(self, numel: int, views: Sequence[Geometry]) -> None:
        """`numel`: of the storage. Raises TooFragmented."""
        maps = [IndexMap.flattening(view).simplified() for view in views]
        grid = grid_shape(numel, {loop.read for index_map in maps for loop in index_map.loops})
        boxes = [to_boxes(index_map, grid, unit_steps=True) for index_map in maps]
        edges: list[set[int]] = [{0, n} for n in grid]
        for box in (box for found in boxes for box in found):
            for d, (a, n) in enumerate(zip(box.start, box.size, strict=True)):
                edges[d].update((a, a + n))
        ordered = [sorted(e) for e in edges]
        index = [{x: i for i, x in enumerate(e)} for e in ordered]
        self._lengths = [np.diff(np.array(e, dtype=np.int64)) for e in ordered]
        if np.prod([len(n) for n in self._lengths], dtype=np.float64) > _MAX_CELLS:
            raise TooFragmented
        self.places: list[list[Place]] = [
            [tuple(slice(i[a], i[a + n]) for i, a, n in zip(index, box.start, box.size, strict=True)) for box in found]
            for found in boxes
        ]

    def counts(self, views: Sequence[Sequence[Place]]) -> np.ndarray:
        """Returns how many of these views have each cell."""
        counts = np.zeros([len(n) for n in self._lengths], dtype=np.int32)
        for at in (at for places in views for at in places):
            counts[at] += 1
        return counts

    def volume(self, chosen: np.ndarray, at: Place) -> int:
        """Returns the number of elements in the chosen cells of a part of the grid."""
        if not chosen.any():
            return 0
        volumes = np.ones((), dtype=np.int64)
        for lengths, part in zip(self._lengths, at, strict=True):
            volumes = np.multiply.outer(volumes, lengths[part])
        return int(volumes[chosen].sum())


_NEEDED = -1  # for a cell that may neither stay nor be left alone


def find_gaps(
    loader: Loader,
    loaded: Loaded,
    every: Sequence[Record],
    specs: Sequence[TensorSpec],
    start: Callable[[], EngineStart] | None,
    may_stay: MayStay,
) -> tuple[tuple[str, ...], tuple[str, ...], Sequence[Step]]:
    """Returns what the loader does not write. Must be called while modules are as the loader knows them.

    every                   its writes, without repeated ones
    specs, start, may_stay  see `tracer.trace`

    That is: names of parameters that a start on the engine's checkpoint does not write either; names in the engine's
    own model of those that may stay, and of parts, see `kept.part_of`; and the step that gives the first ones their
    initial values once. Raises Unsupported, naming a parameter that may not stay as it is.
    """
    model, storages = loader.model, loaded.storages
    stock = StockLoad(loader, specs, every, start, may_stay)
    staying = _kept_modules(loader.repacked, loaded, stock)
    left, kept = check_coverage(storages, every, stock)
    kept += check_buffers(storages, {record.storage for record in every}, stock)
    if kept:
        check_quantized(model, storages, every, kept, stock)
    loader.leave(staying)
    names = tuple(dict.fromkeys(one.name for one in left))
    return names, _names_kept(model, kept, staying), restoring_steps(model, left, stock)


def _kept_modules(modules: Iterable[RepackedModule], loaded: Loaded, stock: StockLoad) -> list[RepackedModule]:
    """Returns the repacked modules that are not written and whose parameters may all be kept."""
    written: Collection[LiveStorage | None] = {record.storage for record in loaded.all_written}

    def is_kept(module: RepackedModule) -> bool:
        parameters = {module.name(name): loaded.storages.get(storage_key(p)) for name, p in _parameters(module)}
        if not parameters or any(storage in written for storage in parameters.values()):
            return False
        if all(map(stock.stays, parameters)):
            return True
        return bool(stock.frozen) and stock.all_may_stay(*(s.name for s in parameters.values() if s is not None))

    return [module for module in modules if is_kept(module)]


def _names_kept(
    model: torch.nn.Module, parameters: Iterable[str], modules: Iterable[RepackedModule]
) -> tuple[str, ...]:
    """Returns the names, in the engine's own model, of parameters and of those of repacked modules, in order."""
    found = {*parameters, *(module.name(name) for module in modules for name, _ in _parameters(module))}
    return tuple(sorted(engine_name(model, name) for name in found))


def _parameters(module: RepackedModule) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, p) for name, p in module.built.parameters.items() if p is not None and p.numel())


def check_coverage(
    storages: dict[int, LiveStorage], records: Sequence[Record], stock: StockLoad
) -> tuple[list[LeftAlone], list[str]]:
    """Raises Unsupported unless every parameter is written exactly once, or may stay as it is.

    A model that has `keeps_unsent` set may have parameters that are not written at all. Nor need parameters of repacked
    modules be: `repack` checks whether anybody reads them.

    stock  says which elements a start on the engine's checkpoint does not write either, and which may stay

    Returns the parameters with elements that neither this nor a start writes, and the names of parameters that stay,
    and of parts, see `kept.part_of`.
    """
    model, as_built = stock.loader.model, stock.loader.as_built
    kept: list[str] = []
    written: dict[LiveStorage, list[Record]] = defaultdict(list)
    only_whole = {storages[key]: "the engine repacks it after loading" for key in as_built if key in storages}
    for record in records:
        if _updates_in_place(record):  # each update would change again what it does not write
            only_whole[record.storage] = "the loader computes it from its own values"
        else:
            written[record.storage].append(record)
    parameters: dict[LiveStorage, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        key = storage_key(parameter)
        if parameter.numel() and (key in storages or parameter.device.type != "meta"):
            parameters[storages[key]].append((name, parameter.data))
    keeps_unsent = getattr(model, "keeps_unsent", False)
    check = _Check(stock)
    for storage in dict.fromkeys((*parameters, *written)):
        if storage in written:
            check.written(storage, parameters[storage], written[storage], only_whole.get(storage, ""))
        elif storage_key(storage.tensor) in as_built:
            continue
        elif all(stock.stays(name) for name, _ in parameters[storage]):
            kept += [name for name, _ in parameters[storage]]
        elif not keeps_unsent:
            check.unwritten(storage, parameters[storage], only_whole.get(storage, ""))
    check.end()
    return check.left, kept + check.kept


def _updates_in_place(record: Record) -> bool:
    """Returns True if the record reads the very elements that it writes, as `p.mul_(2)` does."""
    if not isinstance(record.content, VersionedView):
        return False
    written = record.index_map.written_view
    target = IndexMap.flattening(written).simplified().read_view
    read = [
        leaf.geometry
        for leaf in leaves(record.content)
        if leaf.storage.base is record.storage and leaf.dtype == record.dtype
    ]
    if any(IndexMap.flattening(geometry).simplified().read_view == target for geometry in read):
        return True
    try:
        return bool(read) and not remainder(written, read)[1]
    except TooFragmented:
        return False


class _Gap(NamedTuple):
    """Elements that nothing writes and that may not stay."""

    what: str  # begins the error
    storage: str
    filled_by: Sequence[str]  # tensors of the engine's own checkpoint, which are not sent
    only_whole: str  # why no part of the storage may stay; empty if it may
    written: Sequence[Record] = ()  # the rest of it


class _Check:
    """Checks storage by storage.

    left  parameters with elements that neither the update nor a start on the engine's checkpoint writes
    kept  names of the parts that stay
    """

    def __init__(self, stock: StockLoad) -> None:
        self._stock = stock
        self._gaps: list[_Gap] = []
        self._fused: dict[str, LiveStorage] = {}  # part that stays -> storage that is written in part
        self.left: list[LeftAlone] = []
        self.kept: list[str] = []

    def unwritten(self, storage: LiveStorage, parameters: list[tuple[str, torch.Tensor]], only_whole: str) -> None:
        """`only_whole`: why it must be written even if no start on the engine's checkpoint writes it; else empty."""
        missing = [(name, parameter) for name, parameter in parameters if not is_default_scale(name, parameter)]
        fills = self._stock.fills(storage.name) if missing else ()
        if fills is not None and not fills and not only_whole:
            self.left += [LeftAlone(name, parameter) for name, parameter in missing]
        elif fills and not only_whole and self._stock.all_may_stay(storage.name):
            self.kept += [part for name, _ in missing for part in parts_of(name, source_names(fills))]
        elif missing:
            what = f"{missing[0][0]} is not written by the loader at all: no tensor that was sent reaches it"
            self._add_gap(what, storage, copies_of(fills or ()), only_whole)

    def written(
        self, storage: LiveStorage, parameters: list[tuple[str, torch.Tensor]], records: list[Record], only_whole: str
    ) -> None:
        """Raises Unsupported if an element is written twice. `only_whole`: why no part may stay; empty if it may."""
        # In elements, or in units of the smallest dtype that the storage is written as.
        unit = min(storage.tensor.dtype.itemsize, *(r.dtype.itemsize for r in records))
        wanted = [geometry_of(p).scaled(p.element_size() // unit) for _, p in parameters]
        writes = [record.written(unit) for record in records]
        if runs_cover(wanted, writes):
            return
        fills: Sequence[Record] | None = None
        if sum(g.numel for g in writes) < sum(g.numel for g in wanted):  # the answer may cost a trace
            fills = self._stock.fills(storage.name)
            if unit != storage.tensor.dtype.itemsize or any(r.dtype.itemsize != unit for r in fills or ()):
                only_whole = only_whole or "it is written as two dtypes"
        in_part = () if only_whole else fills or ()
        cells = _cells(storage, unit, [*wanted, *writes, *(record.written(unit) for record in in_part)])
        places = iter(cells.places)
        of_parameters, of_writes, of_fills = (list(islice(places, n)) for n in map(len, (wanted, writes, in_part)))
        counts = cells.counts(of_writes)
        _check_once(storage.name, records, of_writes, counts)
        left_alone = len(in_part)
        stays = np.full_like(counts, _NEEDED if only_whole or fills is None else left_alone)
        needed = []
        for number, (record, filled) in enumerate(zip(in_part, of_fills, strict=True)):
            if all(counts[at].all() for at in filled):
                continue
            if partly := any(counts[at].any() for at in filled):
                only_whole = f"tensors that are sent write some of the elements that {record.label} fills"
            if not (may_stay := not partly and self._stock.may_stay(record)):
                needed.append(record)
            for at in filled:
                stays[at] = np.minimum(stays[at], number if may_stay else _NEEDED)
        for (name, tensor), covered in zip(parameters, of_parameters, strict=True):
            if empty := sum(cells.volume((counts[at] == 0) & (stays[at] == _NEEDED), at) for at in covered):
                what = (
                    f"{name} is not written completely: {empty * unit // tensor.element_size()} of its "
                    f"{tensor.numel()} elements come from no tensor that was sent"
                )
                self._add_gap(what, storage, needed if in_part else fills or (), only_whole, records)
                return
            numbers = {int(n) for at in covered for n in np.unique(stays[at][counts[at] == 0])}
            staying = [in_part[n] for n in sorted(numbers - {left_alone})]
            if parts := [part_of(name, source) for source in source_names(staying)]:
                self._fused[parts[0]] = storage
                self.kept += parts
            if left_alone in numbers:
                self.left.append(LeftAlone(name, tensor, tuple(r.index_map.written_view for r in (*records, *staying))))

    def _add_gap(
        self, what: str, storage: LiveStorage, fills: Sequence[Record], only_whole: str, written: Sequence[Record] = ()
    ) -> None:
        """`fills`: what a start writes there; `written`: the rest of the storage."""
        if fixed := [record for record in fills if not self._stock.could_stay(record)]:
            only_whole = only_whole or f"the loader writes {_labels(fixed)} together with them"
        if shared := written and self._shared(storage):
            only_whole = only_whole or f"it shares elements of {shared} with tensors that are sent"
        self._gaps.append(_Gap(what, storage.name, self._stock.unsent(fills), only_whole, written))

    def end(self) -> None:
        """Raises Unsupported if something is missing, or may not stay by itself."""
        if self._gaps:
            gap = next((gap for gap in self._gaps if gap.only_whole), self._gaps[0])
            raise Unsupported(f"{gap.what}. {self._advice(gap)}")
        for part, storage in self._fused.items():
            if shared := self._shared(storage):
                raise Unsupported(
                    f"{part} may not stay as it is, because it shares elements of {shared} with tensors that are sent. "
                    f"Send all tensors of {storage.name}, or none"
                )

    def _shared(self, storage: LiveStorage) -> str:
        """Returns the name of a storage of the same module that several tensors of a start share; empty if none is."""
        path = storage.name.rpartition(".")[0]
        of_module = (item for item in (self._stock.writes or {}).items() if item[0].rpartition(".")[0] == path)
        return next((name for name, fills in of_module if _share_elements(fills)), "")

    def _advice(self, gap: _Gap) -> str:
        if not gap.filled_by:
            written = f"The rest is written by {_labels(gap.written)}. " if gap.written else ""
            return (
                f"{written}Compare the names that are sent with those of the model's Hugging Face checkpoint; a "
                "quantized weight needs its scale, and frozen= names what stays as it is."
                f"{self._stock.hint(gap.storage)}"
            )
        source = f"The engine's own checkpoint fills it from {some_names(gap.filled_by)}"
        if gap.only_whole:
            return f"{source}. Send these too: no part of it may stay as it is, because {gap.only_whole}"
        advice = self._stock.advice([name for gap in self._gaps for name in gap.filled_by])
        return f"{advice} {source}. Compare the names that are sent with those in it"


def _check_once(
    storage: str, records: Sequence[Record], of_writes: Sequence[Sequence[Place]], counts: np.ndarray
) -> None:
    """Raises Unsupported if an element is written twice."""
    if not (counts > 1).any():
        return
    cell = tuple(int(x) for x in np.argwhere(counts > 1)[0])
    twice = [
        record
        for record, places in zip(records, of_writes, strict=True)
        if any(all(s.start <= c < s.stop for s, c in zip(at, cell, strict=True)) for at in places)
    ]
    raise Unsupported(
        f"the loader writes elements of {storage} more than once, from {_labels(twice)}. Send each weight once, under "
        "one name."
    )


def _labels(records: Sequence[Record]) -> str:
    return some_names(list(dict.fromkeys(record.label for record in records)))


def _share_elements(fills: Sequence[Record]) -> bool:
    """Returns True unless each element is filled from one checkpoint tensor."""
    found = {(record.label, record.dtype, record.index_map.written_view): record for record in fills}
    copies = copies_of(found.values())
    unit = min((record.dtype.itemsize for record in copies), default=1)
    views = [record.written(unit) for record in copies]
    if runs_cover((), views):
        return False
    cells = _cells(copies[0].storage, unit, views)
    return bool((cells.counts(cells.places) > 1).any())


def _cells(storage: LiveStorage, unit: int, views: Sequence[Geometry]) -> Cells:
    try:
        return Cells(storage.tensor.untyped_storage().nbytes() // unit, views)
    except TooFragmented:
        raise Unsupported(
            f"{storage.name} is written in too many pieces to check that every element is written once. Send its "
            "weights in a layout closer to the engine's."
        ) from None
