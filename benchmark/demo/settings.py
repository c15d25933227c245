"""What the user chose and what the launcher settled, as every process of the demo is told."""

from __future__ import annotations

import msgspec

DTYPES = {"float32": ("float32",), "bfloat16": ("bfloat16",), "both": ("float32", "bfloat16")}


class Settings(msgspec.Struct, frozen=True):
    """dtypes: of the engines, one after another; the trainer's weights are float32 throughout.

    transports  of the updates of each engine, one after the other
    folder  for the model, the checkpoints and the digests; removed at the end
    events  the file that trainer rank 0 reports to
    """

    source_tp: int
    target_tp: int
    dtypes: tuple[str, ...]
    bucket_bytes: int
    transports: tuple[str, ...] = ("auto", "auto")
    device: str = "cpu"
    folder: str = ""
    events: str = ""
