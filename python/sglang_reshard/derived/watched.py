"""Notices at every update that something has appeared outside of a model's modules, which `LiveSignature` sees.

The tables of one search are compared column by column, as `LiveSignature` does, without Python code for each value.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from sglang_reshard.derived.reachable import MISSING, Table


@dataclass(slots=True)
class Watched:
    """What may change in some tables.

    mappings, keys  where a value is that is no function: in a dictionary, the variables of a class, a list
    objects, names  the same, for slots, and for the cells of closures that are filled
    empty           cells that are not
    sized           tables to which values may be added
    caches          the functions of caches
    """

    mappings: list[Any] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    empty: list[types.CellType] = field(default_factory=list)
    sized: list[Any] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, tables: Iterable[Table]) -> Watched:
        found = cls()
        for table in tables:
            if table.kind == "cache":
                found.caches.append(table.entries)
            elif table.kind == "closure":
                for cell in table.owner.__closure__:
                    if _is_empty(cell):
                        found.empty.append(cell)
                    elif not callable(cell.cell_contents):
                        found._watch_object(cell, "cell_contents")
            elif table.has_slots:
                for name in table.entries.names():
                    found._watch_object(table.owner, name)
            else:
                entries = vars(table.owner) if table.kind == "class" else table.entries
                found.sized.append(entries)
                keyed = entries.items() if isinstance(entries, Mapping) else enumerate(entries)
                kept = [key for key, value in keyed if not callable(value)]
                found.mappings += [entries] * len(kept)
                found.keys += kept
        return found

    def _watch_object(self, of: Any, name: str) -> None:
        self.objects.append(of)
        self.names.append(name)

    def fingerprint(self) -> tuple[Any, ...]:
        """Returns what changes when state appears: types of values, numbers of values, sizes of caches."""
        try:
            values = [*map(type, map(operator.getitem, self.mappings, self.keys))]
            values += map(type, map(getattr, self.objects, self.names, repeat(MISSING)))
        except (KeyError, IndexError, ValueError):  # something is gone
            return (object(),)
        filled = sum(not _is_empty(cell) for cell in self.empty)
        return values, filled, list(map(len, self.sized)), [cache.cache_info().currsize for cache in self.caches]


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is MISSING
    except ValueError:
        return True
