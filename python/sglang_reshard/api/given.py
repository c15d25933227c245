"""Options that are given by name, for editors and type checkers: `**given: Unpack[UpdateGiven]`.

They are those of `trainer.options`, which documents them and has their defaults. Nothing here is imported at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

import torch

from sglang_reshard.layout.names import Rename
from sglang_reshard.protocol.messages import FlushCache, LoraAdapter, Verify
from sglang_reshard.trainer.options import Delta

if TYPE_CHECKING:
    from sglang_reshard.extras.probe.probe import Probe


class SenderGiven(TypedDict, total=False):
    """The fields of `SenderOptions`."""

    transport: str
    bucket_bytes: int
    timeout_s: float
    delta: Delta
    delta_device: torch.device | None


class UnversionedGiven(TypedDict, total=False):
    """The fields of `UpdateOptions` but `weight_version`."""

    flush_cache: FlushCache
    abort_all_requests: bool
    ignore: Sequence[str]
    verify: Verify
    staged: bool
    unmap_after: bool
    partial: bool
    draft: bool
    rename: Rename | None
    frozen: Sequence[str]
    only: Sequence[str]
    merged: Sequence[str]
    lora: Sequence[LoraAdapter]


class UpdateGiven(UnversionedGiven, total=False):
    """The fields of `UpdateOptions`."""

    weight_version: str | None


class UnversionedUpdateGiven(UnversionedGiven, total=False):
    """The keywords of `WeightSender.update` but `weight_version`."""

    probe: Probe | None


class EnginesGiven(UpdateGiven, total=False):
    """The keywords of `MultiEngineSender.update`."""

    on_failure: Literal["raise", "exclude"]
    probe: Probe | None


class EnginesAsyncGiven(EnginesGiven, total=False):
    """The keywords of `MultiEngineSender.update_async`."""

    latest_only: bool
    shadow_device: torch.device | None
