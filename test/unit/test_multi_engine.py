"""Several engines take the same weights at the same time, and come and go between updates."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from sglang_reshard.api.multi_engine import MultiEngineSender
from sglang_reshard.control import Address
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.errors import EngineRefused, Mismatch, Unsupported
from sglang_reshard.extras.snapshots.of_sender import Snapshots
from sglang_reshard.gpu.runtime import CudaRuntime
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, EngineCommand, Start
from sglang_reshard.protocol.session import Session
from sglang_reshard.trainer.collectives import broadcast_message, gather_messages
from sglang_reshard.trainer.worker import _EngineCommands
from support.gpu_runtime import replaced_runtime
from support.toy import DRIFTING, ToyRank, checkpoint
from support.world import run_world


def sender_to_many(trainer: Any, **options: Any) -> tuple[MultiEngineSender, Session | None]:
    host = Session.host() if trainer.rank == 0 else None
    address = broadcast_message(host.address if host else None, Address, trainer.group)
    ranks = tuple(range(trainer.size))
    return MultiEngineSender(address, trainer_rank=trainer.rank, global_ranks=ranks, timeout_s=30, **options), host


def train(trainer, transport):
    sender, _host = sender_to_many(trainer, transport=transport)
    first, second = trainer.send_one
    told = []
    for version, engines in enumerate([{"a": first}, {"a": first, "b": second}, {"b": second}], start=1):
        sender.set_engines(engines)
        told.append(sorted(sender.update(checkpoint(version).items(), weight_version=str(version))))
    sender.set_engines({})
    with pytest.raises(Mismatch, match="set_engines"):
        sender.update(checkpoint(4).items())
    sender.close()
    return told


def serve(rank, _size, requests, *_):
    """An engine of one rank; which versions it was brought to, exactly."""
    model = ToyRank(0, 1)
    receiver = WeightReceiver(TracedModel(model), 0, 1, torch.device("cpu"))
    seen = []
    for request in requests:
        requests.answer(receiver.update(request))
        stock = ToyRank(0, 1)
        stock.load_weights(checkpoint(int(request.weight_version)).items())
        assert all(torch.equal(getattr(model, name), p) for name, p in stock.named_parameters())
        seen.append(request.weight_version)
    return seen


@pytest.mark.parametrize("transport", ["ipc", "p2p", "broadcast"])
def test_engines_come_and_go(transport):
    told, seen = run_world(2, 2, train, serve, transport)
    assert told == [[["a"], ["a", "b"], ["b"]]] * 2
    assert seen == [["1", "2"], ["2", "3"]]


def train_in_the_background(trainer, folder):
    """Deltas to two engines that are sent the same, and a snapshot between."""
    sender, _host = sender_to_many(trainer, transport="p2p", delta="auto")
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
    told, seen = run_world(2, 2, train_in_the_background, serve, str(tmp_path))
    assert seen == [[str(DRIFTING + version) for version in (1, 2, 3)]] * 2
    for deltas, shared in told:
        assert deltas == [{"a": False, "b": False}, {"a": True, "b": True}, {"a": True, "b": True}]
        assert shared == 1, "both engines are sent the same"
    for version in (DRIFTING + 1, DRIFTING + 2, DRIFTING + 3):
        found = load_file(tmp_path / str(version) / "model-00001-of-00001.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in checkpoint(version).items())


def refuse(_request):
    return DistributedUpdateWeightsOutput(success=False, message="offloaded")


def train_with_one_that_refuses(trainer):
    sender, _host = sender_to_many(trainer)
    refusing = refuse if trainer.rank == 0 else None
    sender.set_engines({"a": trainer.send_one[0], "b": refusing})
    with pytest.raises(EngineRefused) as refused:
        sender.update(checkpoint(1).items(), weight_version="1")
    sender.set_engines({"a": trainer.send_one[0]})
    sender.update(checkpoint(2).items(), weight_version="2")
    sender.close()
    return str(refused.value)


def test_one_engine_that_refuses_is_named_and_the_others_are_updated():
    told, seen = run_world(2, 1, train_with_one_that_refuses, serve)
    assert set(told) == {"1 of 2 engines were not updated: b: offloaded"}
    assert seen == [["1", "2"]]


def train_without_one_that_fails(trainer):
    sender, _host = sender_to_many(trainer)
    asked = []

    def fail(request):
        asked.append(request.weight_version)
        return refuse(request)

    engines = {"a": trainer.send_one[0], "b": fail if trainer.rank == 0 else None}
    told = []
    for version in (1, 2):
        sender.set_engines(engines)
        reports = sender.update(checkpoint(version).items(), weight_version=str(version), on_failure="exclude")
        told.append({name: (report.success, report.message) for name, report in reports.items()})
    excluded, left = sender.excluded, sender.engines
    sender.set_engines({"a": trainer.send_one[0]})
    sender.set_engines({"a": trainer.send_one[0], "b": trainer.send_one[1]})  # it is back, and has recovered
    reports = sender.update(checkpoint(3).items(), weight_version="3", on_failure="exclude")
    told.append({name: (report.success, report.message) for name, report in reports.items()})
    sender.close()
    return told, asked, excluded, left


def test_one_engine_that_fails_is_left_out_until_it_is_back():
    told, seen = run_world(2, 2, train_without_one_that_fails, serve)
    good, bad = (True, ""), (False, "EngineRefused: offloaded")
    for rank, (reports, asked, excluded, left) in enumerate(told):
        assert reports == [{"a": good, "b": bad}, {"a": good}, {"a": good, "b": good}]
        assert asked == ([] if rank else ["1"]), "once, and not again"
        assert (excluded, left) == ({"b": "EngineRefused: offloaded"}, ("a",))
    assert seen == [["1", "2", "3"], ["3"]]


def train_with_a_rank_that_cannot_send_to_one(trainer):
    sender, _host = sender_to_many(trainer, transport="p2p")
    sender.set_engines({"a": trainer.send_one[0], "b": trainer.send_one[1]})
    if trainer.rank == 1:
        sender._sender._worker._of(1)._prepare = None  # not callable
    reports = sender.update(checkpoint(1).items(), weight_version="1", on_failure="exclude")
    sender.update(checkpoint(2).items(), weight_version="2", on_failure="exclude")
    told = reports["b"].message, sender.engines
    sender.close()
    return told


def serve_unless_it_fails(rank, size, requests, *_):
    receiver = WeightReceiver(TracedModel(ToyRank(0, 1)), 0, 1, torch.device("cpu"))
    succeeded = []
    for request in requests:
        output = receiver.update(request)
        requests.answer(output)
        succeeded.append(output.success)
    return succeeded


def test_an_engine_that_one_trainer_rank_cannot_send_to_is_left_out_by_all_of_them():
    told, succeeded = run_world(2, 2, train_with_a_rank_that_cannot_send_to_one, serve_unless_it_fails)
    assert told[0] == told[1]
    message, engines = told[0]
    assert "trainer rank 1: TypeError: 'NoneType' object is not callable" in message
    assert engines == ("a",)
    assert succeeded == [[True, True], [False]], "the other engine is not disturbed"


def train_only_failing_ones(trainer):
    sender, _host = sender_to_many(trainer)
    sender.set_engines({name: refuse if trainer.rank == 0 else None for name in "ab"})
    with pytest.raises(EngineRefused, match="2 of 2 engines were not updated"):
        sender.update(checkpoint(1).items(), on_failure="exclude")
    with pytest.raises(Unsupported, match="on_failure='ignore' is not supported"):
        sender.update(checkpoint(1).items(), on_failure="ignore")
    assert sender.engines == ("a", "b")
    sender.close()


def test_if_all_engines_fail_that_is_raised():
    run_world(2, 0, train_only_failing_ones, serve)


def train_and_offload(trainer):
    sender, _host = sender_to_many(trainer, transport="ipc")
    sender.set_engines({"a": trainer.send_one[0]})
    seconds = [
        sender.update(checkpoint(1).items(), weight_version="1", unmap_after=unmap_after)["a"].seconds
        for unmap_after in (True, False)
    ]
    sender.close()
    return [sorted(phases) for phases in seconds]


def serve_and_look(rank, size, requests):
    receiver = WeightReceiver(TracedModel(ToyRank(0, 1)), 0, 1, torch.device("cpu"))
    kept = []
    for request in requests:
        output = receiver.update(request)
        kept.append(receiver._executor.transfers.last is not None)
        requests.answer(output)
    return kept


def test_memory_is_unmapped_where_it_is_asked_for():
    told, kept = run_world(1, 1, train_and_offload, serve_and_look)
    assert kept == [[False, True]]
    assert "plan" in told[0][1]


def test_messages_are_gathered_in_the_order_of_the_ranks():
    told, _ = run_world(3, 0, gather_own, serve)
    assert told == [[["0"], ["1"] * 2, ["2"] * 3]] * 3


def gather_own(trainer):
    return gather_messages([str(trainer.rank)] * (trainer.rank + 1), list[str], dist.group.WORLD)


class ThirdGpu(CudaRuntime):
    """The calling thread's GPU is cuda:3, and a new thread's cuda:0."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.local()
        self.thread.gpu = 3

    def uses_gpu(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cuda", getattr(self.thread, "gpu", 0))

    @contextmanager
    def using(self, device: torch.device) -> Iterator[None]:
        self.thread.gpu = device.index
        yield


def test_each_engines_thread_uses_the_callers_gpu() -> None:
    """Point 18 of the rules of GPUs: a trainer rank has one, and a new thread starts at GPU 0."""
    seen: dict[int, torch.device] = {}
    with replaced_runtime(ThirdGpu()) as gpus:

        def transfers(engine: int) -> Any:
            def execute(*_: object) -> None:
                seen[engine] = gpus.current_device()

            return SimpleNamespace(execute=execute, abort=None)

        scope: Any = SimpleNamespace(on_abort=lambda _: None, leave=lambda: None)
        channel: Any = SimpleNamespace(engine=lambda _: scope)
        published: Any = object()
        commands = _EngineCommands(transfers, channel, published, lambda: (), 0)
        with commands:
            for engine in (0, 1):
                commands.execute(EngineCommand(engine, Start("t")), alone=False)
    assert seen == {0: torch.device("cuda:3"), 1: torch.device("cuda:3")}
    assert commands.called == (0, 1)
