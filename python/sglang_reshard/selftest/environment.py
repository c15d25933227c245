"""The environment of a run's processes: quiet, offline, and with only those of SGLang's models that it needs."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
from pathlib import Path

from sglang_reshard.patches.launch import TORCHRUN_VARIABLES
from sglang_reshard.testing import cpu_host

# SGLang's switch: modules of models to skip. Every scheduler imports all of them, which is a third of its start: with
# sixteen on two cores, minutes.
_SKIPPED = "SGLANG_DISABLED_MODEL_ARCHS"


def environment(folder: Path, engine_ranks: int, device: str, *model_types: str) -> dict[str, str]:
    """For processes that leave their temporary files in `folder`, and import only the models of `model_types`, if any
    are named.
    """
    temporary = folder / "tmp"  # torch and wandb leave folders behind there
    temporary.mkdir(exist_ok=True)
    # torchrun's variables would lead a server into the trainer's world.
    common = {
        **{name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES},
        "TMPDIR": str(temporary),
        # Nothing here is on a hub, and asking one takes its time where there is no network.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    if model_types:
        common[_SKIPPED] = ",".join(_modules_but(*model_types))
    if device == "cpu":  # as on a host without any GPU, if it has fewer than ranks
        common |= {"CUDA_VISIBLE_DEVICES": "", **cpu_host.environment(engine_ranks)}
    return common


def _modules_but(*needed: str) -> list[str]:
    """Returns the modules of `sglang.srt.models` but those; a skipped one is still importable by the needed."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent / "srt" / "models"
    return [m.name for m in pkgutil.iter_modules([str(folder)]) if not m.ispkg and m.name not in needed]
