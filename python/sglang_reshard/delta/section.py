"""Describes a section to the engine rank that may have it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class DeltaSection(msgspec.Struct, frozen=True, array_like=True):
    """Describes the changes that one trainer rank offers one engine rank instead of all weights.

    base                checksum of what the engine rank must have already
    nbytes              of the section
    kind, gpu, address  where it is, for engine ranks that read it by NIXL
    """

    base: int
    nbytes: int
    kind: str = ""
    gpu: int = 0
    address: int = 0


Sections = Mapping[int, DeltaSection]  # by trainer rank
