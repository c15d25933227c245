"""What can be refused before a byte is written."""

from __future__ import annotations

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources.placements import Layout
from sglang_reshard.trace.program import Program


def check_casts(layout: Layout, program: Program, engine_rank: int) -> None:
    """Raise Unsupported for a copy between dtypes that a plain cast would ruin.

    Between ordinary floating dtypes a cast is what a loader does; into or out of 8-bit floats it would
    skip the scales, and between integers and floats it would reinterpret codes as numbers.
    """
    dtypes = {t.name: t.dtype for t in layout.tensors}
    for copy in program.copies:
        source = dtypes[copy.source]
        live = str(program.targets[copy.target].dtype).removeprefix("torch.")
        if source == live or (source in _CASTABLE and live in _CASTABLE):
            continue
        raise Unsupported(
            f"engine rank {engine_rank}: {copy.source} is {source} at the trainer and {live} in the engine "
            f"({copy.target}), which a cast cannot carry; quantize it at the trainer, or start the engine "
            "without quantization"
        )


_CASTABLE = {"float64", "float32", "float16", "bfloat16"}
