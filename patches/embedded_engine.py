"""Wraps an SGLang engine in this process, with the methods that `RemoteEngine` has for a server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sglang_reshard.errors import EngineRefused, Unsupported
from sglang_reshard.patches.launch import without_torchrun_variables
from sglang_reshard.protocol.messages import PauseMode

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine


class EmbeddedEngine:
    """SGLang's `engine`, whose processes may die without ending this one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    def start(cls, arguments: dict[str, Any]) -> EmbeddedEngine:
        """Starts the engine's processes of this node. Leaves this process's environment as it was.

        arguments  SGLang's ServerArgs, with this node's `node_rank`
        """
        with without_torchrun_variables():
            try:
                from sglang.srt.entrypoints.engine import Engine
            except ImportError as error:
                if "libcuda.so" not in str(error):
                    raise
                raise Unsupported(
                    "SGLang needs a GPU, and this host has none; see docs/usage/cpu-host.md for an engine on a CPU"
                ) from error

            from sglang_reshard.patches.embedded_engine_guard import watch_processes

            # Otherwise an engine's constructor never returns on a node other than the first.
            os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
            engine = Engine(**arguments)
        watch_processes(engine)
        return cls(engine)

    @classmethod
    def start_checked(cls, arguments: dict[str, Any]) -> EmbeddedEngine:
        """As `start`, on the first node. Ends the engine again and raises Unsupported if it cannot be updated."""
        from sglang_reshard.patches.engine import check_installed

        started = cls.start(arguments)
        try:
            check_installed(started.engine)
        except Unsupported:
            started.close()
            raise
        return started

    def __getattr__(self, name: str) -> Any:
        """Returns a method that SGLang's engine has, or that `patches.engine` gives it."""
        return getattr(self.engine, name)

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        manager = self.engine.tokenizer_manager
        self.engine.loop.run_until_complete(manager.pause_generation(PauseGenerationReqInput(mode=mode)))

    def continue_generation(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        manager = self.engine.tokenizer_manager
        self.engine.loop.run_until_complete(manager.continue_generation(ContinueGenerationReqInput()))

    def flush_cache(self) -> None:
        """Raises EngineRefused while requests run."""
        flushed = self.engine.flush_cache()
        if not flushed.success:
            raise EngineRefused(f"SGLang did not flush the cache: {flushed.message or 'requests are running'}")

    def close(self) -> None:
        """Ends the engine's processes, and no others."""
        from sglang_reshard.patches.engine import end

        end(self.engine)
