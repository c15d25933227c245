"""Chooses where an engine rank's weights arrive, from the options of an update and the weights that must be
converted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang_reshard.landings.base import Landing
from sglang_reshard.plan import TensorIndex
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.protocol.session import Session
from sglang_reshard.trace.program import Program

if TYPE_CHECKING:
    from sglang_reshard.landings.shadow import Shadow


class Landings:
    """Makes the landings of one engine rank. Keeps the shadow weights of staged updates from one to the next."""

    def __init__(self, device: torch.device, live: bool) -> None:
        """`live`: requests are served from the memory that programs write."""
        self._device, self._live = device, live
        self._shadow: Shadow | None = None

    def make(
        self,
        request: DistributedUpdateWeightsReq,
        program: Program,
        index: TensorIndex,
        session: Session,
        names: Sequence[str],
        ranks_on_host: int,
        *,
        checked: bool,
    ) -> Landing:
        """Returns where the weights of updates like `request` arrive for `program`.

        index          of the sent tensors
        names          of the tensors in the digest; empty for the layout's own
        ranks_on_host  number of engine ranks that share this one's host memory, with this one
        checked        compare what arrives with the trainer's checksums

        Raises Unsupported if there is no memory for shadow weights.
        """
        landing = self._written(request, program, ranks_on_host)
        if landing.program.arrivals:
            from sglang_reshard.landings.converting import Converting

            landing = Converting(landing, self._device, request.bucket_bytes)
        if checked:
            from sglang_reshard.landings.checked.engine import Checked

            landing = Checked(landing, index, session, names)
        return landing

    def drop(self) -> None:
        """Drops the shadow weights."""
        self._shadow = None

    def _written(self, request: DistributedUpdateWeightsReq, program: Program, ranks_on_host: int) -> Landing:
        if not request.staged:
            self._shadow = None
            return Landing(program)
        from sglang_reshard.landings.shadow import Apart, Shadow, check_room, shadow_bytes

        if not self._live:
            return Apart(program)
        if self._shadow is None or self._shadow.live is not program:
            self._shadow = None  # so that its memory counts as free
            check_room(shadow_bytes(program), ranks_on_host, self._device)
            self._shadow = Shadow(program)
        return self._shadow
