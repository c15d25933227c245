"""Engines that a probe asks, which answer as they are told."""

from __future__ import annotations

from typing import Any

SEQUENCES = [[3, 1, 4], [1, 5]]
TRAINER = ((-1.0, -2.0), (-0.5,))  # log-probabilities of all tokens but the first


def answer(tokens: Any, logprobs: Any, **meta: Any) -> dict[str, Any]:
    """As SGLang answers `return_logprob=True, logprob_start_len=0`."""
    found = [[p, token, None] for p, token in zip([None, *logprobs], tokens, strict=False)]
    return {"meta_info": {"finish_reason": {"type": "length"}, "input_token_logprobs": found, **meta}}


class Engine:
    """Answers as it was told, and keeps what it was asked."""

    def __init__(self, logprobs: Any = TRAINER, info: Any = None, **meta: Any) -> None:
        self.told, self.info, self.meta = logprobs, info, meta
        self.asked: list[dict[str, Any]] = []
        self.recorded: list[Any] = []

    def generate(self, **arguments: Any) -> list[Any]:
        self.asked.append(arguments)
        return [answer(t, p, **self.meta) for t, p in zip(arguments["input_ids"], self.told, strict=True)]

    def record_probe(self, summary: Any) -> None:
        self.recorded.append(summary)


class EngineWithInfo(Engine):
    def weights_info(self) -> Any:
        return self.info.pop(0) if isinstance(self.info, list) else self.info
