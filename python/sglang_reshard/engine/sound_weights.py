"""Refuses to leave parameters as they are where nothing has brought them.

An engine that starts on random values (`load_format="dummy"`), or whose weights were released, has none; nor has one
whose update failed half-way. An update that keeps parameters (`trace.kept`) must not call such an engine complete.
"""

from __future__ import annotations

from collections.abc import Collection

from sglang_reshard.engine.context import LastWrite
from sglang_reshard.errors import Mismatch
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.shown_names import some_names
from sglang_reshard.trace.kept import is_among


def check_kept(kept: Collection[str], request: DistributedUpdateWeightsReq, last: LastWrite, *, torn: bool) -> None:
    """Raises Mismatch if an update would keep a parameter, or a part, that nothing has brought.

    kept  names of those that the update leaves as they are
    torn  whether the last update broke off while it wrote
    """
    unsound: Collection[str] = ()
    if request.stock_changes != last.stock_changes:  # SGLang itself has loaded or released all since
        unsound = () if request.stock_loaded else kept
    elif torn:
        unsound = {name for name in kept if not is_among(name, last.kept)}
    if not unsound:
        return
    raise Mismatch(
        f"{some_names(sorted(unsound))} would stay as they are, and nothing has brought them: the engine was "
        "started with load_format='dummy', its weights were released, or an update of them failed half-way. Send all "
        "tensors once, without frozen= and only=, or let SGLang load the model's checkpoint from disk"
    )
