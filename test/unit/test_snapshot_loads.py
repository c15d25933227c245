"""Engine ranks load snapshots: each reads its own boxes of the files, compares them, and writes nothing that is bad."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sglang_reshard.errors import Aborted, Mismatch
from sglang_reshard.extras.snapshots.manifest import Entry
from sglang_reshard.extras.snapshots.source import open_snapshot, served
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, LoadSnapshotReq
from sglang_reshard.routes.disk.reader import OpenFiles, Run
from support.snapshot_writer import write_tensors
from support.toy import HIDDEN, ToyRank, checkpoint, shapes
from support.toy_repacking import Repacking, started
from support.toy_repacking import weights as repacked
from support.toy_serving import receiver_of
from support.world import run_world

ENGINES = 4
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
STAGED = pytest.mark.parametrize("staged", [True, False], ids=["staged", "in-place"])
Spoil = Callable[[Path], object]


def asked(folder: Path, version: int | str, **options: Any) -> LoadSnapshotReq:
    """Of a version, or of a snapshot in a folder within this one."""
    path = folder / (f"step-{version}" if isinstance(version, int) else version)
    entry = json.loads((path / "snapshot.json").read_text())
    return LoadSnapshotReq(path=str(path), version=path.name, publication=entry["publication"], **options)


def load(trainer: Any, folder: Path, versions: list[int | str], staged: bool, options: dict[str, Any]) -> list[Any]:
    """Loads snapshots one after the other, as the server of an engine does; returns what each has come to."""
    found = []
    options.pop("model", None)
    for version in versions:
        request = asked(folder, version, **options)
        try:
            source = open_snapshot(Path(request.path), Entry(request.version, request.publication), request.ignore)
            with served(source, request, staged=staged) as update:
                output = trainer.send(update)
        except Mismatch as error:
            output = DistributedUpdateWeightsOutput(success=False, message=str(error))
        found.append(output)
    return found


def serve(
    rank: int, size: int, requests: Any, folder: Path, versions: list[int | str], staged: bool, options: dict[str, Any]
) -> list[Any]:
    """One engine rank. Returns its weights after each update, and whether they are torn."""
    model = MODELS[options.pop("model", "toy")](rank, size)
    receiver, states = receiver_of(model, rank, size), []
    for request in requests:
        output = receiver.update(request)
        states.append((receiver.torn, {name: bits(p) for name, p in model.named_parameters()}))
        requests.answer(output)
    states.append(sum(str(folder) in path for path in map(_opened, os.listdir("/proc/self/fd"))))
    return states


def _opened(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # another thread has closed it
        return ""


class Overlapping(torch.nn.Module):
    """Each rank keeps five rows of eight, one of them twice: neither parts of a tensor nor all of it."""

    def __init__(self, rank: int, _size: int) -> None:
        super().__init__()
        self.rank = rank
        for name in ("rows", "again"):
            data = torch.zeros(5, HIDDEN, dtype=torch.bfloat16)
            self.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        for _, loaded in weights:
            self.rows.data.copy_(loaded[self.rank % 2 : self.rank % 2 + 5])
            self.again.data.copy_(loaded[:5])


MODELS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "toy": lambda rank, size: ToyRank(rank, size, torch.bfloat16),
    "overlapping": Overlapping,
    "repacking": lambda rank, size: started(Repacking(2, 8, rank, size), repacked(0, 2, 8)),
}


def rows_of(version: int) -> dict[str, torch.Tensor]:
    return {"rows": checkpoint(version)["up.weight"][:8]}


def bits(parameter: torch.Tensor) -> np.ndarray:
    return parameter.detach().contiguous().view(torch.uint8).numpy().copy()


def assert_loaded(states: list[Any], number: int, weights: dict[str, torch.Tensor], model: str = "toy") -> None:
    """After update `number` all ranks have what they would load of the whole tensors by themselves."""
    for rank, of_rank in enumerate(states):
        torn, live = of_rank[number]
        assert not torn
        if model == "repacking":
            expected = started(Repacking(2, 8, rank, ENGINES), weights)
        else:
            expected = MODELS[model](rank, ENGINES)
            expected.load_weights(weights.items())  # type: ignore[operator]
        for name, parameter in expected.named_parameters():
            assert np.array_equal(live[name], bits(parameter)), (rank, name)


def assert_version(states: list[Any], number: int, version: int, dtype: torch.dtype) -> None:
    assert_loaded(states, number, checkpoint(version, dtype))


def run(folder: Path, versions: list[Any], *, staged: bool, **options: Any) -> tuple[list[Any], list[Any]]:
    (outputs,), states = run_world(1, ENGINES, load, serve, folder, versions, staged, options, deadline_s=100)
    return outputs, states


@DTYPES
@STAGED
def test_each_rank_reads_its_own_boxes_of_the_files(tmp_path: Path, dtype: torch.dtype, staged: bool) -> None:
    for version in (1, 2):
        write_tensors(tmp_path, f"step-{version}", checkpoint(version, dtype), file_bytes=3000, delta=True)
    outputs, states = run(tmp_path, [1, 2], staged=staged, bucket_bytes=1000)
    assert [output.success for output in outputs] == [True, True], outputs[0].message
    for number, version in enumerate((1, 2)):
        assert_version(states, number, version, dtype)
    whole = sum(tensor.nbytes for tensor in checkpoint(1, dtype).values())
    for of_rank in outputs[1].ranks:
        assert of_rank.received_bytes == of_rank.least_bytes
        assert whole / ENGINES < of_rank.received_bytes < whole * 0.45, "its part, and what ranks have alike"
    assert outputs[1].transport == "disk"
    assert bool(outputs[1].digest) == (dtype == torch.bfloat16), "of weights in the engine's dtype"
    assert [of_rank[-1] for of_rank in states] == [0] * ENGINES, "files are closed"


def edited(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Writes snapshot 2 again with other tensors: all hashes are right."""
    tensors = load_file(folder / "step-2" / "model-00001-of-00001.safetensors")
    change(tensors)
    shutil.rmtree(folder / "step-2")
    write_tensors(folder, "step-2", tensors)


def flipped(folder: Path, name: str) -> None:
    """Flips a bit of a tensor, and nothing else."""
    path = folder / "step-2" / "model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    at = 8 + int.from_bytes(data[:8], "little") + header[name]["data_offsets"][1] - 3
    data[at] ^= 1
    path.write_bytes(data)


def rewritten(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Changes the bytes of snapshot 2."""
    path = folder / "step-2" / "model-00001-of-00001.safetensors"
    data = path.read_bytes()
    assert len(change(data)) == len(data)
    path.write_bytes(change(data))


def with_names_exchanged(data: bytes) -> bytes:
    """Two tensors of one shape have each other's name: the bytes of each are those of a tensor of the manifest."""
    return (
        data.replace(b"gate.weight", b"#other#").replace(b"up.weight", b"gate.weight").replace(b"#other#", b"up.weight")
    )


def with_contents_exchanged(data: bytes) -> bytes:
    gate, up = (checkpoint(2)[name].numpy().tobytes() for name in ("gate.weight", "up.weight"))
    return data.replace(gate, b"?" * len(gate)).replace(up, gate).replace(b"?" * len(gate), up)


BAD: dict[str, tuple[Spoil, str]] = {
    "shape": (lambda f: edited(f, lambda t: t.update({"norm.weight": torch.ones(5)})), "norm"),
    "transposed": (lambda f: edited(f, lambda t: t.update({"down.weight": t["down.weight"].T.contiguous()})), "down"),
    "dtype": (lambda f: edited(f, lambda t: t.update({"norm.weight": t["norm.weight"].int()})), "norm"),
    "missing": (lambda f: edited(f, lambda t: t.pop("norm.weight")), "norm"),
    "only-one": (lambda f: edited(f, lambda t: [t.pop(n) for n in list(t) if n != "norm.weight"]), "embed"),
    "unknown": (lambda f: edited(f, lambda t: t.update({"rotary.weight": torch.ones(4)})), "rotary.weight"),
    "renamed": (lambda f: edited(f, lambda t: t.update({"rotary.scale": t.pop("norm.weight")})), "norm"),
    "flipped-in-replicated": (lambda f: flipped(f, "norm.weight"), "norm.weight"),
    "flipped-in-columns": (lambda f: flipped(f, "down.weight"), "down.weight"),
    "flipped-in-heads-of-two": (lambda f: flipped(f, "k.weight"), "k.weight"),
    "exchanged": (lambda f: rewritten(f, with_contents_exchanged), "gate.weight, up.weight"),
    "names-exchanged": (lambda f: rewritten(f, with_names_exchanged), "another table of tensors"),
    "truncated": (lambda f: os.truncate(f / "step-2" / "model-00001-of-00001.safetensors", 5000), "5000 bytes"),
    "gone": (lambda f: (f / "step-2" / "model-00001-of-00001.safetensors").unlink(), "is missing"),
}


@STAGED
def test_what_is_wrong_is_refused_by_name_and_old_weights_stay(tmp_path: Path, staged: bool) -> None:
    for version in (1, 3):
        write_tensors(tmp_path, f"step-{version}", checkpoint(version))
    for case, (spoil, _) in BAD.items():
        write_tensors(tmp_path / case, "step-2", checkpoint(2))
        spoil(tmp_path / case)
    outputs, states = run(tmp_path, [1, *(f"{case}/step-2" for case in BAD), 3], staged=staged)
    assert (outputs[0].success, outputs[-1].success) == (True, True)
    for output, (case, (_, told)) in zip(outputs[1:-1], BAD.items(), strict=True):
        assert (output.success, output.torn, told in output.message) == (False, False, True), (case, output.message)
    for number in range(len(states[0]) - 2):  # of those that engine ranks have heard of
        assert_version(states, number, 1, torch.float32)
    assert_version(states, len(states[0]) - 2, 3, torch.float32)


def test_open_files_stay_what_they_were_or_are_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path, "step-1", checkpoint(1))
    request = asked(tmp_path, 1)
    files = open_snapshot(Path(request.path), Entry(request.version, request.publication)).files
    path, size = tmp_path / "step-1" / files.files[0].name, files.files[0].nbytes
    whole, other = np.empty(size, np.uint8), tmp_path / "other"
    other.write_bytes(bytes(size))
    opened = OpenFiles(files, [0])
    content = path.read_bytes()
    os.replace(other, path)  # a folder that is deleted and written again
    opened.read(Run(0, 0, whole))
    assert whole.tobytes() == content
    opened.check_unchanged()
    opened.close()
    with pytest.raises(Mismatch, match="was replaced"):
        OpenFiles(files, [0])
    path.write_bytes(content)
    opened = OpenFiles(files, [0])
    os.utime(path, ns=(0, 0))
    with pytest.raises(Mismatch, match="was written while it was read"):
        opened.check_unchanged()
    os.truncate(path, size // 2)
    with pytest.raises(Mismatch, match="was truncated while it was read"):
        opened.read(Run(0, 0, whole))
    opened.abort()
    with pytest.raises(Aborted):
        opened.read(Run(0, 0, whole[:8]))
    opened.close()


def test_heads_that_are_their_embeddings_need_not_be_read(tmp_path: Path) -> None:
    tied = checkpoint(1) | {"lm_head.weight": checkpoint(1)["embed.weight"].clone()}
    write_tensors(tmp_path, "step-1", tied)
    write_tensors(tmp_path, "step-2", tied | {"lm_head.weight": tied["lm_head.weight"] + 1})
    outputs, _ = run(tmp_path, [1, 2], staged=True)
    assert outputs[0].success, outputs[0].message
    assert not outputs[1].success
    assert "lm_head.weight differs from embed.weight" in outputs[1].message
    assert HIDDEN in shapes()["embed.weight"]


@STAGED
def test_regions_that_are_no_parts_are_compared_as_whole_tensors(tmp_path: Path, staged: bool) -> None:
    for version in (1, 2, 3):
        write_tensors(tmp_path, f"step-{version}", rows_of(version))
    flipped(tmp_path, "rows")  # in the last row, which no rank reads
    outputs, states = run(tmp_path, [1, 2, 3], staged=staged, model="overlapping", bucket_bytes=64)
    assert [output.success for output in outputs] == [True, False, True], outputs[0].message
    for number, version in enumerate((1, 1, 3)):
        assert_loaded(states, number, rows_of(version), "overlapping")


def test_names_may_have_a_trainers_wrappers(tmp_path: Path) -> None:
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in checkpoint(1).items()}
    write_tensors(tmp_path, "step-1", wrapped)
    outputs, states = run(tmp_path, [1], staged=True)
    assert outputs[0].success, outputs[0].message
    assert "module._orig_mod.embed.weight is read as embed.weight" in outputs[0].message
    assert_version(states, 0, 1, torch.float32)


def test_a_loader_that_would_raise_at_an_ignored_tensor_does_not_get_it(tmp_path: Path) -> None:
    for version in (1, 2):
        adapter = {"a.lora_A": torch.ones(3), "q.lora_B": torch.ones(5, 2)}
        write_tensors(tmp_path, f"step-{version}", adapter | checkpoint(version))
    flipped(tmp_path, "q.lora_B")  # nobody reads it
    outputs, states = run(tmp_path, [1, 2], staged=True, ignore=("*.lora_*",))
    assert [output.success for output in outputs] == [True, True], outputs
    for number, version in enumerate((1, 2)):
        assert_version(states, number, version, torch.float32)
    request = asked(tmp_path, 1)
    source = open_snapshot(Path(request.path), Entry(request.version, request.publication), ("*.lora_*",))
    assert source.remark == "ignored: a.lora_A, q.lora_B"


@STAGED
def test_weights_that_are_repacked_are_compared_before(tmp_path: Path, staged: bool) -> None:
    for version in (1, 2, 3):
        write_tensors(tmp_path, f"step-{version}", repacked(version, 2, 8))
    flipped(tmp_path, "layers.1.weight")
    outputs, states = run(tmp_path, [1, 2, 3], staged=staged, model="repacking", ignore=("*.left.bound",))
    assert [output.success for output in outputs] == [True, False, True], outputs[0].message
    for number, version in enumerate((1, 1, 3)):
        assert_loaded(states, number, repacked(version, 2, 8), "repacking")
