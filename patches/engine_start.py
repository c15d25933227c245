"""sglang.srt.model_loader: the load format and folders of this engine's models, and the values that a start on dummy
weights must not change.

`sglang_reshard.trace.stock_load` learns from it which tensors an update may leave as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_reshard.errors import ReshardError
from sglang_reshard.layout.checkpoint_headers import folder_specs
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.patches.draft_models import OWN
from sglang_reshard.trace.initial_values import keep_initial_values, kept_values
from sglang_reshard.trace.stock_load import EngineStart

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

_START = "_reshard_start"  # on the model runner
_DUMMY = "dummy"


def randomize(initialize: Callable[..., None], model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Runs SGLang's own initialisation with dummy weights, which then spares persistent buffers."""
    with keep_initial_values(model):
        initialize(model, *args, **kwargs)


class _Start(NamedTuple):
    """Where the weights of a model runner came from when its engine started. SGLang forgets it with its own updates."""

    model_path: str
    revision: str | None
    download_dir: str | None
    load_format: Any

    @classmethod
    def of(cls, runner: ModelRunner) -> _Start:
        config, loading = runner.model_config, runner.load_config
        return cls(config.model_path, config.revision, loading.download_dir, loading.load_format)


def remember_start(runner: ModelRunner) -> None:
    """Must be called when the runner has loaded its model, and before any update."""
    setattr(runner, _START, _Start.of(runner))


def checkpoint_specs(runner: ModelRunner) -> list[TensorSpec]:
    """Returns the tensors of the folder that SGLang has loaded last. Raises OSError, ValueError and ReshardError."""
    return _specs(runner.model, _Start.of(runner))


def engine_start(runner: ModelRunner, drafts: Sequence[torch.nn.Module]) -> EngineStart:
    """Returns how the model of a runner and its draft models were started. Reads headers of files, and no weights."""
    arguments, start = runner.server_args, getattr(runner, _START, None) or _Start.of(runner)
    randomized = _randomized([runner.model], start.load_format)
    randomized += _randomized(drafts, arguments.speculative_draft_load_format or arguments.load_format)
    try:
        specs = _specs(runner.model, start)
        if drafts:
            specs += _specs_of_drafts(runner)
    except (ReshardError, OSError, ValueError) as error:
        return EngineStart(None, str(error), randomized)
    return EngineStart(specs, randomized=randomized)


def _randomized(models: Sequence[torch.nn.Module], load_format: Any) -> list[torch.nn.Module]:
    """Returns the models that may have been randomized without `randomize`."""
    if str(getattr(load_format, "value", load_format)) != _DUMMY:
        return []
    return [model for model in models if kept_values(model) is None]


def _specs(model: torch.nn.Module, start: _Start) -> list[TensorSpec]:
    """Raises OSError or ReshardError if the checkpoint's files are not on this host, or are not as usual."""
    if getattr(model, "allow_patterns_overrides", None) or getattr(model, "secondary_weights", None):
        raise OSError(f"{type(model).__name__} has its weights in several folders, which is not supported here")
    return folder_specs(_folder(start.model_path, start.revision, start.download_dir))


def _specs_of_drafts(runner: ModelRunner) -> list[TensorSpec]:
    """Returns the tensors that only draft models get: none, if they are layers of the target's checkpoint."""
    arguments = runner.server_args
    path = arguments.speculative_draft_model_path
    if path is None or path == arguments.model_path:
        return []
    folder = _folder(path, arguments.speculative_draft_model_revision, runner.load_config.download_dir)
    return [TensorSpec(OWN + spec.name, spec.shape, spec.dtype) for spec in folder_specs(folder)]


def _folder(model_path: str, revision: str | None, download_dir: str | None) -> Path:
    """Returns the folder of a model, which may be a name on the Hub. Downloads nothing; raises OSError without one."""
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_path, revision=revision, cache_dir=download_dir, local_files_only=True))
    except (OSError, ValueError) as error:
        raise OSError(f"{model_path} is not on this host") from error
