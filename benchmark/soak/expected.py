"""What a version's weights make of the engine, without this package: `python -m benchmark.soak.expected QUESTION`.

transformers says the tokens, and SGLang's own `load_weights`, in a process of its own, leaves what every
engine rank should hold.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from benchmark.reference import greedy_tokens
from benchmark.soak.weights import ENGINE_TP, shapes, whole
from sglang_reshard.selftest import tiny_model
from tools.oracle.stock import stock_digests

PROMPTS = [[5, 6, 7, 8], [100, 200], [17, 4000, 23]]
NEW_TOKENS = 12
DTYPE = "float32"
# Of the self-test's model are 80 MB each on disk, all of a batch at a time.
_BATCH = 10


class Question(msgspec.Struct, frozen=True):
    """model: folder of the configuration that the server was started from. answer: the file to write."""

    model: str
    folder: str
    versions: list[int]
    answer: str


class Expected(msgspec.Struct, frozen=True):
    """Of one version. lead: the smallest that a chosen token's logit had over the next best."""

    version: int
    tokens: list[list[int]]
    lead: float
    digests: list[dict[str, str]]


def main(question: Question) -> None:
    torch.set_num_threads(1)
    found: list[Expected] = []
    for begin in range(0, len(question.versions), _BATCH):
        found += _batch(question, question.versions[begin : begin + _BATCH])
    Path(question.answer).write_bytes(msgspec.json.encode(found))


def read_answer(question: Question) -> dict[int, Expected]:
    found = msgspec.json.decode(Path(question.answer).read_bytes(), type=list[Expected])
    return {expected.version: expected for expected in found}


def _batch(question: Question, versions: list[int]) -> list[Expected]:
    folders = [Path(question.folder) / f"checkpoint-{version}" for version in versions]
    said = []
    for version, folder in zip(versions, folders, strict=True):
        folder.mkdir()
        shutil.copy(Path(question.model) / "config.json", folder)
        tensors = {name: whole(name, shape, version) for name, shape in shapes().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        said.append(greedy_tokens(folder, PROMPTS, NEW_TOKENS, DTYPE))
    loads = stock_digests(
        question.model, folders, tp_size=ENGINE_TP, dtype=DTYPE, context_length=tiny_model.CONTEXT_LENGTH
    )
    for folder in folders:
        shutil.rmtree(folder)
    return [
        Expected(version, tokens, lead, [load[rank] for rank in range(ENGINE_TP)])
        for version, (tokens, lead), load in zip(versions, said, loads, strict=True)
    ]


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Question))
