"""Updates that send what has changed: bit for bit a full update, and never on another base than they are of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.errors import EngineRefused, Unsupported
from support.nixl_env import needs_nixl, use_nixl
from support.sweep import sweep
from support.toy import ToyRank
from support.toy_changes import HIDDEN, become, same, sharded
from support.world import run_world

CPU = torch.device("cpu")
TRAINERS, ENGINES = 2, 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def train(trainer: Any, given: str, options: dict[str, Any], *_: Any) -> list[Any]:
    sender = WeightSender.over(
        trainer.group, trainer.send, timeout_s=30, transport="p2p", delta="auto", bucket_bytes=8192
    )
    weights = sharded(1, DTYPES[given])
    reports = []
    for version in range(1, 7):
        become(weights, version, DTYPES[given])
        reports.append(sender.update(weights.items(), weight_version=str(version), **options))
    sender.close()
    return reports


def serve(rank: int, size: int, requests: Any, given: str, _: Any, live: str) -> list[bool]:
    """Whether the live weights are the version's after each update. Before the fourth somebody else writes to them."""
    model = ToyRank(rank, size, DTYPES[live], HIDDEN)
    receiver = WeightReceiver(TracedModel(model), rank, size, CPU)
    seen = []
    for request in requests:
        if request.update == 4 and rank == 1:
            model.down.data[0, 0] += 1
        requests.answer(receiver.update(request))
        seen.append(same(model, request.update, DTYPES[given], DTYPES[live]))
    return seen


@pytest.mark.parametrize(
    ("given", "live", "options"),
    [
        ("bfloat16", "bfloat16", {"verify": "full"}),
        ("float32", "bfloat16", {"staged": True}),
        sweep("float32", "float32", {}),
        sweep("bfloat16", "float32", {"staged": True, "verify": "full"}),
    ],
    ids=str,
)
def test_what_has_changed_is_all_that_is_sent(given: str, live: str, options: dict[str, Any]) -> None:
    told, seen = run_world(TRAINERS, ENGINES, train, serve, given, options, live)
    assert seen == [[True] * 6] * ENGINES
    for reports in told:
        assert [report.delta for report in reports] == [False, True, True, False, True, True]
        whole, *_ = (report.received_bytes for report in reports)
        for report in reports:
            if report.delta:
                assert 0 < report.received_bytes < whole / 8
                assert "plan" not in report.seconds
            else:
                assert report.received_bytes == whole
        if options.get("verify") == "full":
            assert len({report.digest for report in reports}) == 6


def refuse(trainer: Any) -> tuple[list[bool], list[int]]:
    """An engine that refuses a version, one that everything changes in, and one that nothing does."""
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30, transport="p2p", delta="auto")
    dtype = torch.bfloat16
    weights = sharded(1, dtype)
    deltas, nbytes = [], []
    for update in range(1, 8):
        become(weights, update, dtype)
        if update == 5:
            with torch.no_grad():
                for tensor in weights.values():
                    tensor.to_local().neg_()
        if update == 7:
            become(weights, 6, dtype)
        try:
            report = sender.update(weights.items())
        except EngineRefused:
            assert update == 3
            continue
        deltas.append(report.delta)
        nbytes.append(report.received_bytes)
    sender.close()
    return deltas, nbytes


def serve_refusing(rank: int, size: int, requests: Any) -> list[bool]:
    model = ToyRank(rank, size, torch.bfloat16, HIDDEN)
    receiver = WeightReceiver(TracedModel(model), rank, size, CPU)
    seen = []
    for request in requests:
        requests.answer(receiver.update(request, "not now" if request.update == 3 else ""))
        version = {3: 2, 7: 6}.get(request.update, request.update)
        seen.append(request.update == 5 or same(model, version, torch.bfloat16, torch.bfloat16))
    return seen


def test_a_missed_version_is_made_up_for() -> None:
    told, seen = run_world(TRAINERS, ENGINES, refuse, serve_refusing)
    assert seen == [[True] * 7] * ENGINES
    for deltas, nbytes in told:
        assert deltas == [False, True, True, False, False, True], "the fifth changes all, and the sixth changes it back"
        assert nbytes[2] < nbytes[0] / 8, "against the second, as the third was refused"
        assert nbytes[-1] < 1000, "nothing has changed"


def change_one_rank(trainer: Any, transport: str) -> list[Any]:
    """All that trainer rank 0 holds changes in the third update, and again in the fourth; little of the others'."""
    use_nixl()
    sender = WeightSender.over(
        trainer.group, trainer.send, timeout_s=30, transport=transport, delta="auto", bucket_bytes=8192
    )
    weights, reports = sharded(1, torch.float32), []
    for version in range(1, 6):
        become(weights, version, torch.float32)
        if version == 3 and trainer.rank == 0:
            with torch.no_grad():
                for tensor in weights.values():
                    tensor.to_local().neg_()
        reports.append(sender.update(weights.items(), verify="full"))
    sender.close()
    return reports


def serve_one_rank(rank: int, size: int, requests: Any, _transport: str) -> list[bool]:
    use_nixl()
    model = ToyRank(rank, size, torch.float32, HIDDEN)
    receiver = WeightReceiver(TracedModel(model), rank, size, CPU)
    seen = []
    for request in requests:
        requests.answer(receiver.update(request))
        seen.append(request.update == 3 or same(model, request.update, torch.float32, torch.float32))
    return seen


@pytest.mark.parametrize("transport", ["p2p", pytest.param("nixl", marks=needs_nixl)])
def test_a_trainer_rank_whose_shards_have_all_changed_sends_them_whole_and_the_others_do_not(transport: str) -> None:
    told, seen = run_world(3, 2, change_one_rank, serve_one_rank, transport)
    assert seen == [[True] * 5] * 2
    for reports in told:
        assert [report.delta for report in reports] == [False, True, True, True, True]
        full, little, *partly, again = (report.received_bytes for report in reports)
        assert max(little, again) < full / 8
        assert all(full / 4 < nbytes < full / 2 for nbytes in partly)


def choose(trainer: Any) -> None:
    with pytest.raises(Unsupported, match="delta='auto' has no effect with transport='ipc'"):
        WeightSender.over(trainer.group, trainer.send, transport="ipc", delta="auto")
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30, delta="auto")
    weights = sharded(1, torch.float32)
    for version in (1, 2):
        become(weights, version, torch.float32)
        report = sender.update(weights.items())
        assert (report.transport, report.delta) == ("ipc", False)
    sender.close()


def test_none_is_sent_where_memory_is_mapped() -> None:
    run_world(TRAINERS, 1, choose, serve_mapped)


def serve_mapped(rank: int, size: int, requests: Any) -> None:
    receiver = WeightReceiver(TracedModel(ToyRank(rank, size, torch.float32, HIDDEN)), rank, size, CPU)
    for request in requests:
        requests.answer(receiver.update(request))
