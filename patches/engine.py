"""sglang.srt.entrypoints.engine: `Engine.update_weights_distributed`, and a check that it will work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_reshard.errors import Unsupported
from sglang_reshard.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.version import __version__

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine


def apply() -> None:
    from sglang.srt.entrypoints.engine import Engine

    Engine.update_weights_distributed = update_weights_distributed


def update_weights_distributed(self: Engine, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
    """Reshard a trainer's weights into the live parameters; see `sglang_reshard.sender` for the other side."""
    return self.loop.run_until_complete(self.tokenizer_manager.update_weights_distributed(request))


def check_installed(engine: Engine) -> None:
    """Raise Unsupported unless this engine and its schedulers carry these patches, in this version."""
    if not hasattr(engine, "update_weights_distributed"):
        raise Unsupported(
            "SGLang did not load the sglang-reshard plugin: look for 'Failed to load plugin reshard' in its log, "
            "and see that SGLANG_PLUGINS, if it is set, names 'reshard'"
        )
    try:
        # A stock scheduler answers an unknown method with an error and lives on.
        engine.collective_rpc("check_reshard_version", version=__version__)
    except AssertionError as error:
        raise Unsupported(
            "SGLang's scheduler processes do not carry sglang-reshard as this process does; install the same "
            f"version on every node of the engine: {error}"
        ) from error
