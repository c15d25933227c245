"""How trainer ranks tell each other what only each knows of its own shards."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Exchange(Protocol):
    """A collective over the trainer ranks: every rank's message, in the order of the ranks. Metadata only."""

    def __call__(self, message: Any, kind: type[T]) -> list[T]: ...
