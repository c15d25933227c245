"""Defines the JSON response of `GET /weights_info`, which describes a server's live weights."""

from __future__ import annotations

import msgspec


class LayoutInfo(msgspec.Struct, frozen=True):
    """The source layout of the live weights.

    hash           content hash: equal for trainers that hold the same tensors in the same way
    trainer_ranks  number of trainer ranks
    tensors        number of checkpoint tensors
    nbytes         of all tensors together, each counted once, in the trainer's dtypes
    """

    hash: str
    trainer_ranks: int
    tensors: int
    nbytes: int


class WeightsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a server's live weights, and the update that brought them.

    The fields of the update (`digest` to `layout`) are empty unless an update of this package brought the live weights:
    before the first one, after an update by SGLang's own methods, and while the weights are torn or released.

    version          SGLang's weight_version
    package_version  of sglang-reshard on the server
    protocol         of the server; a trainer's must be the same. 0 of a release that tells none
    torn             why no request is served; empty unless a failed update has left weights of two versions
    missing          why no request is served; empty unless the engine started on dummy weights, or released its
                     weights, and nothing has brought any since
    under_way        True while an update is running
    digest           of all weights, see `landings.checked.whole_model`: equal for equal weights, independent of the
                     parallelism of trainer and engine. Empty unless the update had verify="full"
    verified         how the update was verified: "off", "sample" or "full"
    session, update  the session's name (not its key), and the number of the update in it
    transport        that moved the weights
    engine_ranks     number of engine ranks that hold them
    layout           the trainer's layout of these weights; None without an update
    kept             names of parameters, and of parts of fused ones, that the update left as they were; the digest
                     covers their names and versions, not their values
    kept_versions    weight_version -> names of the kept parameters that have it, and "draft.*" of draft models that the
                     update left. All others have `version`
    paused           True while generation is paused: requests wait
    data_parallel_ranks  number of ranks among which requests are distributed
    adapters     name of each LoRA adapter -> version that an update brought; empty for one that SGLang loaded
    publication  the latest that the server holds or has held, see `protocol.publication`; 0 if none. Weights that
                 SGLang's own methods bring have none and leave it: they count as later
    """

    version: str
    package_version: str
    protocol: int = 0
    torn: str = ""
    missing: str = ""
    under_way: bool = False
    digest: str = ""
    verified: str = ""
    session: str = ""
    update: int = 0
    transport: str = ""
    engine_ranks: int = 0
    layout: LayoutInfo | None = None
    kept: tuple[str, ...] = ()
    kept_versions: dict[str, tuple[str, ...]] = {}
    paused: bool = False
    data_parallel_ranks: int = 1
    adapters: dict[str, str] = {}
    publication: int = 0
