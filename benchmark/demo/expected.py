"""What a stock load puts on every engine rank: `python -m benchmark.demo.expected QUESTION`.

A process of its own, so that the launcher follows and ends it as it does the trainer and the engine.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from benchmark.demo import tiny_model
from benchmark.demo.events import EventWriter
from benchmark.demo.verdict import Expected


class Question(msgspec.Struct, frozen=True):
    """checkpoints: the engine's dtype -> checkpoints it was brought to. The answer is written to `answer`."""

    model: str
    checkpoints: dict[str, list[str]]
    target_tp: int
    events: str
    answer: str


def main(question: Question) -> None:
    from tools.oracle.stock import stock_digests

    events = EventWriter(Path(question.events))
    answer: Expected = {}
    for dtype, checkpoints in question.checkpoints.items():
        with events.phase(f"compare with stock loads of the same checkpoints, {dtype}"):
            loads = stock_digests(
                question.model,
                checkpoints,
                tp_size=question.target_tp,
                dtype=dtype,
                context_length=tiny_model.CONTEXT_LENGTH,
            )
        answer[dtype] = {
            checkpoint: [by_rank[rank] for rank in range(question.target_tp)]
            for checkpoint, by_rank in zip(checkpoints, loads, strict=True)
        }
    Path(question.answer).write_bytes(msgspec.json.encode(answer))


def read_answer(question: Question) -> Expected:
    return msgspec.json.decode(Path(question.answer).read_bytes(), type=Expected)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Question))
