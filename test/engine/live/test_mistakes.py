"""Mistakes against a live engine: each refused by name before a byte is written, the old weights served on."""

from __future__ import annotations

from typing import Any

import pytest

from support.trainers import run_trainers

pytestmark = [pytest.mark.engine]

# What was done -> the error's class, and what it has to say: which tensor, which rank, what to do.
MISTAKES = {
    "unknown name": ("EngineRefused", "engine rank 0", "model.layers.1.mlp.no_such_proj.weight", "ignore="),
    "missing": (
        "EngineRefused",
        "engine rank 0",
        "model.layers.1.mlp.down_proj.weight",
        "not written by the loader",
        "Compare the names",
    ),
    "wrong shape": ("EngineRefused", "engine rank 0", "model.norm.weight", "Compare names, shapes and dtypes"),
    "integers": (
        "EngineRefused",
        "engine rank 0",
        "model.norm.weight",
        "torch.int32",
        "Send the tensor in the engine's format",
    ),
    "complex numbers": ("Unsupported", "trainer rank 0", "model.norm.weight", "complex64", "cast it first"),
    "a name on one rank only": ("Mismatch", "trainer rank 1", "tensors", "the same tensors in the same order"),
    "another order on one rank": ("Mismatch", "trainer rank 1", "model.embed_tokens.weight", "same order"),
    "another shape on one rank": ("Mismatch", "trainer rank 1", "model.norm.weight", "shape", "(5,)"),
    "another dtype on one rank": ("Mismatch", "trainer rank 1", "model.norm.weight", "dtype", "bfloat16"),
    "partial": ("Unsupported", "model.layers.1.mlp.down_proj.weight", "Partial(sum)", "redistribute"),
    "meta": ("Unsupported", "trainer rank 0", "model.norm.weight", "meta", "materialize it"),
    "sparse": ("Unsupported", "trainer rank 0", "model.norm.weight", "sparse", "pass a dense one"),
    "same version": ("EngineRefused", "already version '1'", "a different weight_version"),
    "offloaded": ("EngineRefused", "engine rank 0", "offloaded", "resume_memory_occupation"),
    "a rank never shows up": ("DeadlineExceeded", "trainer ranks [1]", "within 3 s", "look at the logs of these ranks"),
    "another protocol": ("EngineRefused", "0.0.9", "install the same version"),
    "while another runs": ("EngineRefused", "is running", "repeat this one when it has ended"),
    "half of the mesh": ("Unsupported", "hold", "elements"),
}
ON_ONE_RANK = {"a rank never shows up", "while another runs", "half of the mesh"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two trainer ranks and a TP=2 engine, in float32."""
    return run_trainers(
        2,
        "mistakes_job:make_all",
        tmp_path_factory.mktemp("mistakes"),
        source_tp=2,
        target_tp=2,
        dtype="float32",
        bucket_bytes=1 << 20,
    )


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_by_name(ranks: list[dict[str, Any]], mistake: str) -> None:
    kind, *words = MISTAKES[mistake]
    refusal = ranks[0]["refusals"][mistake]
    assert refusal[0] == kind, refusal
    assert all(word in refusal[1] for word in words), refusal[1]
    if mistake not in ON_ONE_RANK:
        assert ranks[1]["refusals"][mistake] == refusal


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_engine_says_the_same_after_it(ranks: list[dict[str, Any]], mistake: str) -> None:
    assert ranks[0]["tokens"][mistake] == ranks[0]["tokens"]["before"]


def test_every_mistake_that_was_made_is_looked_at(ranks: list[dict[str, Any]]) -> None:
    assert set(ranks[0]["refusals"]) == set(MISTAKES)


def test_no_byte_was_written(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["untouched"]


def test_the_next_update_works(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["report"]["success"]
    assert ranks[0]["tokens"]["after"] == ranks[0]["expected"]
    assert ranks[0]["expected"] != ranks[0]["tokens"]["before"]
