"""Requests that are being served while weights change."""

from __future__ import annotations

import asyncio
from typing import Any

GREEDY = {"temperature": 0, "ignore_eos": True}
_ON_THEIR_WAY_S = 2.0  # the detokenizer of a busy host may stand still for more than one


class Flight:
    """A request of rank 0's that is being served while weights change."""

    def __init__(self, engine: Any, prompt: list[int], new_tokens: int, **options: Any) -> None:
        self._engine = engine
        self._first = asyncio.Event()
        self._task = engine.loop.create_task(self._generate(prompt, new_tokens, options))
        self.tokens: list[int] = []
        self.count = 0
        self.reason: dict[str, Any] = {}
        self.meta_info: dict[str, Any] = {}  # with its last tokens

    async def _generate(self, prompt: list[int], new_tokens: int, options: dict[str, Any]) -> None:
        chunks = await self._engine.async_generate(
            input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": new_tokens}, stream=True, **options
        )
        async for chunk in chunks:
            self.tokens = list(chunk["output_ids"])
            self.count = chunk["meta_info"]["completion_tokens"]
            self.meta_info = chunk["meta_info"]
            self.reason = self.meta_info["finish_reason"] or {}
            self._first.set()

    def wait(self) -> None:
        """Waits for its first tokens."""
        self._engine.loop.run_until_complete(self._first.wait())

    def pause(self, mode: str) -> int:
        """Wait for its first tokens, or the next after `resume`, pause; how many tokens it had when the schedulers had
        paused.
        """
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        async def go() -> int:
            await self._first.wait()
            await self._engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=mode))
            # A control request is answered after the pause. Tokens that were made before it may still be on their
            # way: they come by the detokenizer, and the answer does not.
            await self._engine.tokenizer_manager.get_internal_state()
            had = -1
            while had < len(self.tokens):
                had = len(self.tokens)
                await asyncio.sleep(_ON_THEIR_WAY_S)
            return had

        return self._engine.loop.run_until_complete(go())

    def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._first.clear()
        request = ContinueGenerationReqInput()
        self._engine.loop.run_until_complete(self._engine.tokenizer_manager.continue_generation(request))

    def go_on(self) -> dict[str, Any]:
        self.resume()
        return self.end()

    def end(self) -> dict[str, Any]:
        """Waits until it ends. Returns its tokens, how many the engine has counted, and why it ended."""
        self._engine.loop.run_until_complete(self._task)
        return {"tokens": self.tokens, "count": self.count, "reason": self.reason.get("type")}
