"""Lets all engine ranks of an update look together for the names that their loaders read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from sglang_reshard.engine.context import UpdateContext
from sglang_reshard.engine.names.search import LoaderNames, Reading, find_names, reading
from sglang_reshard.engine.targets import Target
from sglang_reshard.layout.source_layout import SourceLayout


def search_names(context: UpdateContext, target: Target, layout: SourceLayout) -> LoaderNames:
    """Returns the names of the update's tensors as loaders read them. Collective over engine ranks.

    layout  of the sent tensors

    Raises, on all engine ranks, what `find_names` raises.
    """
    rounds = itertools.count()

    def probe(names: Sequence[str]) -> list[Reading]:
        specs = [replace(tensor.spec, name=name) for tensor, name in zip(layout.tensors, names, strict=True)]
        return context.all_gather(f"names/{next(rounds)}", reading(target.names_read(specs), names))

    request = context.request
    return find_names(request.layout, [tensor.name for tensor in layout.tensors], request.ignore, probe)
