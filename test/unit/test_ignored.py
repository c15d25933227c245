"""What `ignore=` matches is left out on the trainer's side: no loader sees it, and no byte of it moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sglang_reshard.errors import Mismatch
from sglang_reshard.extras.snapshots.of_sender import Snapshots
from sglang_reshard.layout.names import Renaming
from sglang_reshard.sources import FusedSlice, FusedTensor, describe
from sglang_reshard.sources.memory_identity import MemoryIdentity
from support.toy import ToyRank, checkpoint
from support.toy_serving import answered, receiver_of, version_of
from support.world import run_world

ADAPTER = {"q.lora_A.weight": torch.ones(2, 2), "q.lora_B.weight": torch.ones(2, 2)}
LORA = Renaming.of({"policy.": ""}, ("*.lora_*",))


def serve(rank: int, size: int, requests: Any, *_: Any) -> tuple[list[int | None], set[str]]:
    """The live version after each update, and all names that the loader was given."""
    model, given = ToyRank(rank, size), set()
    load = model.load_weights

    def noting(weights: Any) -> None:  # a model's attributes are restored after a trace
        load((given.add(name) or name, tensor) for name, tensor in weights)

    model.load_weights = noting
    return [version_of(model) for _ in answered(receiver_of(model), requests)], given


def train(trainer: Any, kind: str) -> list[tuple[str, bool]]:
    sender = trainer.sender()
    state = checkpoint(1) | ADAPTER
    found = []
    for version in (1, 2, 3):
        for name, tensor in checkpoint(version).items():
            state[name].copy_(tensor)
        listed = state.items()
        if kind == "partial":
            listed = [pair for n, pair in enumerate(state.items()) if n % trainer.size == trainer.rank]
        options = {"ignore": ["*.lora_*"], "partial": kind == "partial"}
        report = sender.update_async(listed, **options).wait() if kind == "async" else sender.update(listed, **options)
        found.append((report.message, "trace" in report.seconds))
    return found


@pytest.mark.parametrize("kind", ["update", "partial", "async"])
def test_a_loader_that_would_raise_at_an_ignored_tensor_does_not_get_it(kind: str) -> None:
    told, engines = run_world(2, 2, train, serve, kind)
    for versions, given in engines:
        assert versions == [1, 2, 3]
        assert given == {*checkpoint(1)}
    remarks = [f"ignored: {', '.join(ADAPTER)}"] * 2
    if kind == "partial":
        remarks = [f"ignored: {name}" for name in ADAPTER]
    for rank, of_rank in enumerate(told):
        assert of_rank == [(remarks[rank], True), (remarks[rank], False), (remarks[rank], False)]


def test_what_is_ignored_need_not_be_a_tensor_that_can_be_sent() -> None:
    given = {
        "policy.a": torch.zeros(2, 3),
        "policy.x.lora_A": torch.zeros(2).to_sparse(),
        "policy.x.lora_B": "an adapter",
        "policy.b": torch.ones(4),
    }
    state = describe(given, trainer_rank=0, global_ranks=(0,), rename=LORA)
    assert [tensor.name for tensor in state.layout.tensors] == ["a", "b"]
    assert state.ignored == ("x.lora_A", "x.lora_B")
    listed = list(given.items())
    known = MemoryIdentity.of(listed, state.inputs)
    assert known is not None
    assert known.unchanged(list(given.items()))
    assert not known.unchanged(listed[:-1])
    assert not known.unchanged(
        [("policy.c", torch.ones(2)) if name == "policy.x.lora_A" else (name, t) for name, t in listed]
    )
    listed[0] = "policy.a", torch.zeros(2, 3)
    assert not known.unchanged(listed)


def test_slices_of_a_fused_tensor_are_left_out_one_by_one() -> None:
    slices = FusedTensor((("a", FusedSlice((0, 0), (1, 2), (0, 1))), ("a.lora_A", FusedSlice((1, 0), (2, 2), (0, 1)))))
    given = [("any.lora_name", torch.zeros(2, 2), slices)]
    state = describe(given, trainer_rank=0, global_ranks=(0,), rename=LORA)
    assert [tensor.name for tensor in state.layout.tensors] == ["a"]
    assert state.ignored == ("a.lora_A",)


def test_if_nothing_is_left_the_error_names_the_patterns() -> None:
    with pytest.raises(Mismatch, match=r"no tensors were passed but those that ignore=\['\*'\] leaves out"):
        describe(ADAPTER, trainer_rank=0, global_ranks=(0,), rename=Renaming.of(None, ["*"]))


def write(trainer: Any, folder: Path) -> None:
    snapshots = Snapshots(trainer.sender(), folder, ignore="*.lora_*")
    snapshots.write(checkpoint(1) | ADAPTER, "step-1")
    snapshots.write_async(checkpoint(1) | ADAPTER, "step-2").wait()


def test_snapshots_are_written_without_what_is_ignored(tmp_path: Path) -> None:
    run_world(1, 1, write, serve, tmp_path)
    for name in ("step-1", "step-2"):
        assert load_file(tmp_path / name / "model-00001-of-00001.safetensors").keys() == checkpoint(1).keys()
