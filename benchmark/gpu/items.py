"""All items of the battery, in the order in which they run."""

from __future__ import annotations

from benchmark.gpu import (
    copy_items,
    digest_items,
    host_items,
    memory_items,
    mishap_items,
    nccl_items,
    rate_items,
    replay_items,
    two_gpu_items,
    update_items,
)
from benchmark.gpu.item import Item

_THEMES = (
    memory_items,
    copy_items,
    rate_items,
    update_items,
    mishap_items,
    nccl_items,
    digest_items,
    host_items,
    replay_items,
    two_gpu_items,
)
# These tell most, should there be no time for all. The first one compiles what the others run.
FIRST = (
    "exact copies",
    "rate",
    "end to end",
    "handle life",
    "replay of qwen3-30b-a3b-tp8-ep8",
    "NCCL alone",
    "cost of copies",
    "many storages",
    "watchdog",
    "streams",
    "host arena",
)
_PLACES = {name: place for place, name in enumerate(FIRST)}
ITEMS: tuple[Item, ...] = tuple(
    sorted(
        (item for theme in _THEMES for item in theme.ITEMS),
        key=lambda item: (_PLACES.get(item.name, len(FIRST)), item.number),
    )
)


def chosen(words: list[str]) -> tuple[Item, ...]:
    """Returns the items with these numbers, or with these words in their names; all of them for none."""
    found = [i for i in ITEMS if not words or any(w == str(i.number) if w.isdigit() else w in i.name for w in words)]
    if not found:
        raise SystemExit(f"no item is called {', '.join(words)}; there are: {', '.join(i.name for i in ITEMS)}")
    return tuple(found)
