"""An update whose engine is out of reach leaves a snapshot instead; any other failure is raised, and leaves nothing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_reshard import MultiEngineSender, Snapshots, WeightSender
from sglang_reshard.control import Address
from sglang_reshard.errors import EngineRefused, EngineUnreachable, Mismatch, Unsupported
from sglang_reshard.extras.snapshots.manifest import decode_snapshot
from support.refusals import refusal_of
from support.toy import checkpoint
from support.toy_serving import serve
from support.world import run_world


class Link:
    """Reaches the engine, unless it is told how to fail."""

    def __init__(self, send):
        self.send, self.fails = send, None

    def __call__(self, request):
        if self.fails is not None:
            raise self.fails
        return self.send(request)


def train(trainer, folder):
    link = Link(trainer.send)
    snapshots = Snapshots(trainer.sender(lambda _: link), folder)

    def update(version, **options):
        named = {f"policy.{name}": tensor for name, tensor in checkpoint(version).items()}
        given = iter(named.items())  # which can be read once
        return snapshots.update_or_write(given, weight_version=str(version), rename={"policy.": ""}, **options)

    told = [(report.success, report.transport) for report in [update(1)]]
    link.fails = EngineRefused("it is asleep")
    told.append(refusal_of(lambda: update(2)))
    there = Path(folder).exists()
    link.fails = EngineUnreachable("nobody there.")
    reports = [update(version, partial=True) for version in (2, 3, 4, 5)]
    told += [(report.success, report.transport, report.weight_version, report.message) for report in reports]
    link.fails = None
    told += [(report.success, report.transport) for report in [update(6)]]
    return told, there


def test_what_no_engine_took_is_in_the_folder(tmp_path):
    folder = tmp_path / "run"
    (first, second), (seen,) = run_world(2, 1, train, serve, str(folder))
    assert first == second
    told, there = first
    assert seen == [1, 6]
    assert told[0] == told[-1] == (True, "ipc")
    assert told[1][0] == "EngineRefused"
    assert "it is asleep" in told[1][1]
    assert not there
    for version, (success, transport, named, message) in zip("2345", told[2:-1], strict=True):
        assert (success, transport, named) == (False, "disk", version)
        assert message.startswith("nobody there.")
        assert message.endswith(f"The weights were written to {folder / version}")
    assert {path.name for path in folder.iterdir()} == {"latest", "snapshots.json", "3", "4", "5"}
    assert decode_snapshot((folder / "5" / "snapshot.json").read_bytes(), "5").base == "4", "its delta is of that one"
    for version in (3, 4, 5):
        found, expected = load_file(folder / str(version) / "model-00001-of-00001.safetensors"), checkpoint(version)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_it_is_of_one_engine_and_names_are_checked_at_once(tmp_path):
    several = MultiEngineSender(Address("s", "127.0.0.1", 1, "00"), trainer_rank=0, global_ranks=(0,))
    with pytest.raises(Unsupported, match="on_failure='exclude'"):
        Snapshots(several, tmp_path).update_or_write({}, weight_version="1")
    nobody = object.__new__(WeightSender)  # of which nothing is asked
    for version in ("a/b", "latest", ".partial"):
        with pytest.raises(Mismatch, match="cannot be the name of a snapshot"):
            Snapshots(nobody, tmp_path).update_or_write({}, weight_version=version)
    with pytest.raises(TypeError, match="kept"):
        Snapshots(several, tmp_path, kept=3)
