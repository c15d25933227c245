"""Updates that send what has changed: bit for bit a full update, never on another base, and never a damaged delta."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from sglang_reshard.errors import ReshardError
from sglang_reshard.routes.delta.encoding import Kind, counts_and_positions
from sglang_reshard.routes.delta.source import DeltaSource
from support.nixl_env import needs_nixl, use_nixl
from support.sweep import sweep
from support.toy import ToyRank
from support.toy_changes import HIDDEN, become, sharded, weights_of
from support.toy_serving import receiver_of
from support.world import run_world

FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Story:
    """What a trainer sends in updates 1, 2, ..., and what happens to some of them.

    versions  of the weights, by update
    negated   which trainer ranks' shards are all changed, by update
    written   the update before which somebody else writes to live weights
    refused   the update that the engine refuses
    damaged   the update of which one engine rank gets a damaged delta, and what is damaged in it
    """

    given: torch.dtype = BF16
    live: torch.dtype = BF16
    transport: str = "p2p"
    options: dict[str, Any] = field(default_factory=dict)
    versions: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    negated: dict[int, tuple[int, ...]] = field(default_factory=dict)
    written: int = 0
    refused: int = 0
    damaged: tuple[int, str] = (0, "")


def train(trainer: Any, story: Story) -> list[Any]:
    """Returns the report of each update, or what its error says."""
    use_nixl()
    given = {"timeout_s": 60, "transport": story.transport, "delta": "auto", "bucket_bytes": 8192}
    sender = trainer.sender(**given)
    weights, told = sharded(1, story.given), []
    with mock.patch.object(DeltaSource, "encode", encoding(trainer.rank, *story.damaged)):
        for update, version in enumerate(story.versions, start=1):
            become(weights, version, story.given)
            if trainer.rank in story.negated.get(update, ()):
                for tensor in weights.values():
                    tensor.to_local().neg_()
            try:
                told.append(sender.update(weights.items(), weight_version=str(update), **story.options))
            except ReshardError as error:
                told.append(str(error))
    return told


def serve(rank: int, size: int, requests: Any, story: Story) -> list[tuple[int, bool]]:
    """Returns which version the live weights are after each update, 0 for none, and whether they are torn."""
    use_nixl()
    model = ToyRank(rank, size, story.live, HIDDEN)
    receiver = receiver_of(model)
    seen = []
    for request in requests:
        if request.update == story.written and rank == 1:
            model.down.data[0, 0] += 1
        output = receiver.update(request, "not now" if request.update == story.refused else "")
        requests.answer(output)
        found = [version for version in {*story.versions} if not model.differing(weights_of(version, story.given))]
        seen.append((found[0] if found else 0, output.torn or bool(receiver.torn)))
    return seen


def tell(story: Story, trainers: int = 2, engines: int = 4) -> tuple[list[list[Any]], list[int]]:
    """Returns what each trainer rank is told, and the versions that all engine ranks have. None is ever torn."""
    told, seen = run_world(trainers, engines, train, serve, story)
    assert seen == [[(version, False) for version, _ in seen[0]]] * engines
    return told, [version for version, _ in seen[0]]


@pytest.mark.parametrize(
    ("given", "live", "options"),
    [
        (BF16, BF16, {"verify": "full"}),
        (FP32, BF16, {"staged": True}),
        sweep(FP32, FP32, {}),
        sweep(BF16, FP32, {"staged": True, "verify": "full"}),
    ],
    ids=str,
)
def test_what_has_changed_is_all_that_is_sent(given: torch.dtype, live: torch.dtype, options: dict[str, Any]) -> None:
    told, versions = tell(Story(given, live, options=options, written=4))
    assert versions == [1, 2, 3, 4, 5, 6]
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


def test_a_missed_version_is_made_up_for() -> None:
    told, versions = tell(Story(versions=(1, 2, 3, 4, 5, 6, 6), negated={5: (0, 1)}, refused=3))
    assert versions == [1, 2, 2, 4, 0, 6, 6]
    for reports in told:
        assert "not now" in reports.pop(2)
        deltas, nbytes = [report.delta for report in reports], [report.received_bytes for report in reports]
        assert deltas == [False, True, True, False, False, True], "the fifth changes all, and the sixth changes it back"
        assert nbytes[2] < nbytes[0] / 8, "against the second, as the third was refused"
        assert nbytes[-1] < 1000, "nothing has changed"


@pytest.mark.parametrize("transport", ["p2p", pytest.param("nixl", marks=needs_nixl)])
def test_a_trainer_rank_whose_shards_have_all_changed_sends_them_whole_and_the_others_do_not(transport: str) -> None:
    """Trainer rank 0 in the third update, and in the fourth, which changes them back."""
    story = Story(FP32, FP32, transport, {"verify": "full"}, versions=(1, 2, 3, 4, 5), negated={3: (0,)})
    told, versions = tell(story, trainers=3, engines=2)
    assert versions == [1, 2, 0, 4, 5]
    for reports in told:
        assert [report.delta for report in reports] == [False, True, True, True, True]
        full, little, *partly, again = (report.received_bytes for report in reports)
        assert max(little, again) < full / 8
        assert all(full / 4 < nbytes < full / 2 for nbytes in partly)


def test_none_is_sent_where_memory_is_mapped() -> None:
    told, versions = tell(Story(transport="auto", versions=(1, 2)), engines=1)
    assert versions == [1, 2]
    assert [(report.transport, report.delta) for report in told[0]] == [("ipc", False)] * 2


def encoding(trainer_rank: int, damaged: int, what: str) -> Any:
    """Returns `DeltaSource.encode`, which damages what trainer rank 1 sends one engine rank in the update."""
    real, spoiled = DeltaSource.encode, []

    def encode(source: DeltaSource, update: int) -> bool:
        found = real(source, update)
        if update == damaged and trainer_rank == 1 and found and not spoiled:
            spoiled.append(source)
            spoil(source, what)
        return found

    return encode


def spoil(source: DeltaSource, what: str) -> None:
    """Damages the encoded messages, in the memory that they are sent from."""
    begin = source._messages.table_bytes
    for number, encoded in enumerate(source._encoded.encoded):
        units = source._messages.units[number]
        end = begin + encoded.index_bytes(units)
        if what == "kind":
            source.section[:8].view(torch.int64)[0] = 7
        elif encoded.kind is Kind.POSITIONS:
            counts, positions = counts_and_positions(encoded, units, source.section[begin:end])
            if what == "count":
                counts[0] = 50_000_000
            else:
                positions[-1] = -1 if units % (1 << 16) else 0
        elif encoded.kind is Kind.MASK:
            source.section[begin] ^= 1
        begin = end


@pytest.mark.parametrize(
    ("what", "options"),
    [("count", {}), ("position", {"verify": "full"}), sweep("kind", {}), sweep("count", {"staged": True})],
    ids=str,
)
def test_a_damaged_delta_changes_nothing_on_any_rank(what: str, options: dict[str, Any]) -> None:
    """And the next update sends all weights."""
    told, versions = tell(Story(options=options, versions=(1, 2, 3, 4, 5), damaged=(3, what)), engines=2)
    assert versions == [1, 2, 2, 4, 5]
    for reports in told:
        error = reports.pop(2)
        assert [report.delta for report in reports] == [False, True, False, True]
        assert "trainer rank 1 sent engine rank" in error
        assert "a damaged delta of" in error
        assert "repeat the update, which sends all weights" in error
