"""Agrees on all tensors where each trainer rank lists those that it holds: a pipeline stage's, its own experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.layout.union import union
from sglang_reshard.protocol.session import Session

_FETCH_S = 60.0  # a layout that was published before its hash was exchanged


@dataclass(frozen=True, slots=True)
class Stages:
    """The tensors that all trainer ranks list together.

    own     content hash of this rank's layout
    listed  content hash of each trainer rank's layout
    layout  of all tensors
    """

    own: str
    listed: tuple[str, ...]
    layout: SourceLayout

    @classmethod
    def of(
        cls,
        session: Session,
        own: SourceLayout | None,
        known: Stages | None,
        exchange: Callable[[str], Sequence[str]],
    ) -> tuple[Stages, bool]:
        """Returns what all ranks list, and whether it is what was `known`. Collective.

        own  layout of what this rank lists; None if that is what it listed before

        Only metadata is exchanged: hashes, and layouts of which some hash is new. Raises as `union` does.
        """
        if own is not None:
            digest = session.put(own)
        else:
            assert known is not None
            digest = known.own
        listed = tuple(exchange(digest))
        if known is not None and known.listed == listed:
            return known, True
        distinct = list(dict.fromkeys(listed))
        layouts = [session.get(other, SourceLayout, "the source layout", _FETCH_S) for other in distinct]
        return cls(digest, listed, union(layouts, [distinct.index(other) for other in listed])), False
