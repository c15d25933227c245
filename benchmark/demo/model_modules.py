"""Which of SGLang's model modules a demo of one model can do without.

Every scheduler imports all of them, which is a third of its start: with sixteen on two cores, minutes.
SGLang has a switch for that, an environment variable that lists modules to skip.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from pathlib import Path

DISABLED_VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"


def unneeded_modules(*needed: str) -> list[str]:
    """Modules of `sglang.srt.models` but those; a skipped one is still importable by the needed."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent / "srt" / "models"
    return [m.name for m in pkgutil.iter_modules([str(folder)]) if not m.ispkg and m.name not in needed]
