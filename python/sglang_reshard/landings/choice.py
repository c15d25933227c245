"""Chooses where an engine rank's weights arrive, from the options of an update and the weights that must be
converted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_reshard.landings.base import Landing

if TYPE_CHECKING:
    from sglang_reshard.engine.context import UpdateContext
    from sglang_reshard.engine.targets import TargetPlan
    from sglang_reshard.landings.shadow import Apart, Shadow
    from sglang_reshard.trace.program import Program


class Landings:
    """Makes the landings of one engine rank. Keeps the shadow weights of staged updates from one to the next."""

    def __init__(self, device: torch.device, live: bool) -> None:
        """`live`: requests are served from the memory that programs write."""
        self._device, self._live = device, live
        self._shadow: Shadow | None = None

    def make(self, update: UpdateContext, target: TargetPlan, ranks_on_host: int, *, checked: bool) -> Landing:
        """Returns where the weights of updates like this one arrive.

        ranks_on_host  number of engine ranks that share this one's host memory, with this one
        checked        compare what arrives with the trainer's checksums

        Raises Unsupported if there is no memory for shadow weights.
        """
        apart = self._apart(target.program, ranks_on_host) if update.request.staged else None
        if apart is None:
            self._shadow = None
        landing = Landing(target.program, apart).converting(self._device, update.request.bucket_bytes)
        if checked:
            from sglang_reshard.landings.checked.target import Checks

            names = target.names.names
            landing.checks = Checks(landing.program, target.tensor_index, update.session, names)
        return landing

    def drop(self) -> None:
        """Drops the shadow weights."""
        self._shadow = None

    def _apart(self, program: Program, ranks_on_host: int) -> Apart:
        from sglang_reshard.landings.shadow import Apart, Shadow, check_room, shadow_bytes

        if not self._live:
            return Apart(program)
        if self._shadow is None or self._shadow.live is not program:
            self._shadow = None  # so that its memory counts as free
            check_room(shadow_bytes(program), ranks_on_host, self._device)
            self._shadow = Shadow(program)
        return self._shadow
