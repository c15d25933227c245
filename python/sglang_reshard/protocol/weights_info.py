"""What a server says of its live weights: `GET /weights_info`, as JSON."""

from __future__ import annotations

import msgspec


class LayoutInfo(msgspec.Struct, frozen=True):
    """The layout of the trainer whose update is live.

    hash           of the whole layout: equal for trainers that hold the same tensors in the same way
    trainer_ranks  among whom it is spread
    tensors        of the checkpoint
    nbytes         of all tensors together, each once, in the trainer's dtypes
    """

    hash: str
    trainer_ranks: int
    tensors: int
    nbytes: int


class WeightsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """All but `version`, `torn`, `under_way` and `package_version` is of the update that brought the live weights.

    It is empty where no update of this package did: before the first one, after an update by SGLang's own ways, while
    the weights are torn or released.

    version          SGLang's weight_version
    package_version  of sglang-reshard, on the server; a trainer's must be the same
    torn             why no request is served; empty while the weights are sound
    under_way        whether an update is running now
    digest           of all weights, see `digest.whole`: equal for equal weights, whatever the sizes of trainer and
                     engine. Empty unless the update had verify="full"
    verified         how far the update was verified: "off", "sample" or "full"
    session, update  which update of which session. It is the session's name, not its key
    transport        by which the weights came
    engine_ranks     that hold them
    """

    version: str
    package_version: str
    torn: str = ""
    under_way: bool = False
    digest: str = ""
    verified: str = ""
    session: str = ""
    update: int = 0
    transport: str = ""
    engine_ranks: int = 0
    layout: LayoutInfo | None = None
