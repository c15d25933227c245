"""Several engines take the same weights at the same time, and come and go between updates."""

import pytest
import torch
from safetensors.torch import load_file

from sglang_reshard.errors import EngineRefused, Mismatch, Unsupported
from sglang_reshard.extras.snapshots.of_sender import Snapshots
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput
from support.several_engines import several_engines_sender
from support.toy import DRIFTING, checkpoint
from support.toy_serving import serve_alone
from support.world import run_world


def train_in_the_background(trainer, folder):
    """Deltas to two engines that are sent the same, and a snapshot between."""
    sender, _host = several_engines_sender(trainer, timeout_s=30, transport="p2p", delta="auto")
    with pytest.raises(Mismatch, match="call set_engines first"):
        Snapshots(sender, folder).write({}, "early")
    sender.set_engines(dict(zip("ab", trainer.send_one, strict=True)))
    weights = {name: tensor.clone() for name, tensor in checkpoint(DRIFTING + 1).items()}
    told = []
    for version in (DRIFTING + 1, DRIFTING + 2, DRIFTING + 3):
        for name, tensor in checkpoint(version).items():
            weights[name].copy_(tensor)
        handle = sender.update_async(weights.items(), weight_version=str(version))
        written = Snapshots(sender, folder).write_async(weights.items(), str(version))
        told.append({name: report.delta for name, report in handle.wait(30).items()})
        written.wait(30)
    shared = len(sender._sender._worker._shared["delta"]._known)
    sender.close()
    return told, shared


def test_updates_in_the_background_of_several_engines_share_what_has_changed(tmp_path):
    told, seen = run_world(2, 2, train_in_the_background, serve_alone, str(tmp_path))
    assert seen == [[DRIFTING + version for version in (1, 2, 3)]] * 2
    for deltas, shared in told:
        assert deltas == [{"a": False, "b": False}, {"a": True, "b": True}, {"a": True, "b": True}]
        assert shared == 1, "both engines are sent the same"
    for version in (DRIFTING + 1, DRIFTING + 2, DRIFTING + 3):
        found = load_file(tmp_path / str(version) / "model-00001-of-00001.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in checkpoint(version).items())


def refuse(_request):
    return DistributedUpdateWeightsOutput(success=False, message="offloaded")


def train_with_one_that_refuses(trainer):
    """It is named, then left out until it is back; where all refuse, that is raised."""
    sender, _host = several_engines_sender(trainer, timeout_s=30)
    asked = []

    def fail(request):
        asked.append(request.weight_version)
        return refuse(request)

    good, back = trainer.send_one
    refusing = fail if trainer.rank == 0 else None
    told = []

    def update(version, on_failure="exclude"):
        given = checkpoint(version).items()
        reports = sender.update(given, weight_version=str(version), on_failure=on_failure)
        told.append({name: (report.success, report.message) for name, report in reports.items()})

    sender.set_engines(dict.fromkeys("cd", refusing))
    with pytest.raises(EngineRefused, match="2 of 2 engines were not updated"):
        update(1)
    with pytest.raises(Unsupported, match="on_failure='ignore' is not supported"):
        update(1, "ignore")
    assert sender.engines == ("c", "d")
    sender.set_engines({"a": good, "b": refusing})
    with pytest.raises(EngineRefused, match="1 of 2 engines were not updated: b: offloaded"):
        update(1, "raise")
    for version in (2, 3):
        sender.set_engines({"a": good, "b": refusing})
        update(version)
    excluded, left = sender.excluded, sender.engines
    sender.set_engines({"a": good})
    sender.set_engines({"a": good, "b": back})  # it is back, and has recovered
    update(4)
    sender.close()
    return told, asked, excluded, left


def test_one_engine_that_refuses_is_named_and_left_out_until_it_is_back():
    told, seen = run_world(2, 2, train_with_one_that_refuses, serve_alone)
    good, bad = (True, ""), (False, "EngineRefused: offloaded")
    for rank, (reports, asked, excluded, left) in enumerate(told):
        assert reports == [{"a": good, "b": bad}, {"a": good}, {"a": good, "b": good}]
        assert asked[2:] == ([] if rank else ["1", "2"]), "once with each update, and not again"
        assert (excluded, left) == ({"b": "EngineRefused: offloaded"}, ("a",))
    assert seen == [[1, 2, 3, 4], [4]]


def train_with_a_rank_that_cannot_send_to_one(trainer):
    sender, _host = several_engines_sender(trainer, timeout_s=30, transport="p2p")
    sender.set_engines({"a": trainer.send_one[0], "b": trainer.send_one[1]})
    if trainer.rank == 1:
        sender._sender._worker._transfers[1]._prepare = None  # not callable
    reports = sender.update(checkpoint(1).items(), weight_version="1", on_failure="exclude")
    sender.update(checkpoint(2).items(), weight_version="2", on_failure="exclude")
    told = reports["b"].message, sender.engines
    sender.close()
    return told


def test_an_engine_that_one_trainer_rank_cannot_send_to_is_left_out_by_all_of_them():
    told, seen = run_world(2, 2, train_with_a_rank_that_cannot_send_to_one, serve_alone)
    assert told[0] == told[1]
    message, engines = told[0]
    assert "trainer rank 1: TypeError: 'NoneType' object is not callable" in message
    assert engines == ("a",)
    assert seen == [[1, 2], [0]], "the other engine is not disturbed"
