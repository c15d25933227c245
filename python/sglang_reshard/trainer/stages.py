"""Agrees on all tensors where each trainer rank lists those that it holds: a pipeline stage's, its own experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.layout.union import union
from sglang_reshard.protocol.session import Session

_FETCH_S = 60.0  # a layout that was published before its hash was exchanged


@dataclass(frozen=True, slots=True)
class Stages:
    """The tensors that all trainer ranks list together.

    listed  content hash of each trainer rank's layout, which is in the session
    layout  of all tensors
    """

    listed: tuple[str, ...]
    layout: SourceLayout

    @classmethod
    def of(cls, session: Session, listed: Sequence[str], known: Stages | None = None) -> Stages:
        """Returns what all ranks list: `known`, if that is the same. Layouts are fetched otherwise.

        Raises as `union` does.
        """
        if known is not None and known.listed == tuple(listed):
            return known
        distinct = list(dict.fromkeys(listed))
        layouts = [session.get(digest, SourceLayout, "the source layout", _FETCH_S) for digest in distinct]
        return cls(tuple(listed), union(layouts, [distinct.index(digest) for digest in listed]))
