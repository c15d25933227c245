"""All items of the battery, by their numbers."""

from __future__ import annotations

from benchmark.gpu import (
    copy_items,
    digest_items,
    host_items,
    memory_items,
    mishap_items,
    nccl_items,
    replay_items,
    two_gpu_items,
    update_items,
)
from benchmark.gpu.item import Item

_THEMES = (
    memory_items,
    copy_items,
    update_items,
    mishap_items,
    nccl_items,
    digest_items,
    host_items,
    replay_items,
    two_gpu_items,
)
ITEMS: tuple[Item, ...] = tuple(sorted((i for theme in _THEMES for i in theme.ITEMS), key=lambda item: item.number))


def chosen(words: list[str]) -> tuple[Item, ...]:
    """Returns the items with these numbers, or with these words in their names; all of them for none."""
    found = [i for i in ITEMS if not words or any(w == str(i.number) if w.isdigit() else w in i.name for w in words)]
    if not found:
        raise SystemExit(f"no item is called {', '.join(words)}; there are: {', '.join(i.name for i in ITEMS)}")
    return tuple(found)
