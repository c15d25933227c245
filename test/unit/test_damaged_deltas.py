"""A damaged delta to one engine rank: no rank writes any of it, the old weights serve, the next update is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.errors import ReshardError
from sglang_reshard.routes.delta.encoding import Index, Kind
from sglang_reshard.routes.delta.messages import table_bytes
from sglang_reshard.routes.delta.source import DeltaSource
from support.sweep import sweep
from support.toy import ToyRank
from support.toy_changes import HIDDEN, become, same, sharded
from support.world import run_world

BF16 = torch.bfloat16
TRAINERS, ENGINES = 2, 2
SPOILED = 3  # the update of which a delta is damaged


def spoil(source: DeltaSource, what: str) -> None:
    """Damages the encoded messages, in the memory that they are sent from."""
    begin = table_bytes(len(source._messages))
    for number, encoded in enumerate(source._encoded):
        units = source._messages.units[number]
        end = begin + encoded.index_bytes(units)
        counts, positions, bits = Index.of(encoded, units, source.section[begin:end])
        if what == "kind":
            source.section[:8].view(torch.int64)[0] = 7
        elif encoded.kind is Kind.POSITIONS and what == "count":
            counts[0] = 50_000_000
        elif encoded.kind is Kind.POSITIONS:
            positions[-1] = -1 if units % (1 << 16) else 0
        elif encoded.kind is Kind.MASK:
            bits[0] ^= 1
        begin = end


def train(trainer: Any, what: str, options: dict[str, Any]) -> list[str]:
    real, spoiled = DeltaSource.encode, []

    def encode(source: DeltaSource, update: int) -> bool:
        found = real(source, update)
        if update == SPOILED and trainer.rank == 1 and found and not spoiled:
            spoiled.append(source)  # what it sends to one engine rank
            spoil(source, what)
        return found

    DeltaSource.encode = encode  # type: ignore[method-assign]
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=60, transport="p2p", delta="auto")
    weights, told = sharded(1, BF16), []
    for version in range(1, 6):
        become(weights, version, BF16)
        try:
            report = sender.update(weights.items(), weight_version=str(version), **options)
            told.append("delta" if report.delta else "whole")
        except ReshardError as error:
            told.append(str(error))
    sender.close()
    return told


def serve(rank: int, size: int, requests: Any, what: str, options: dict[str, Any]) -> list[tuple[int, bool]]:
    """Which version the live weights are after each update, 0 for none, and whether they are torn."""
    model = ToyRank(rank, size, BF16, HIDDEN)
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    seen = []
    for request in requests:
        output = receiver.update(request)
        requests.answer(output)
        versions = [version for version in range(1, 6) if same(model, version, BF16, BF16)]
        seen.append((versions[0] if versions else 0, output.torn or bool(receiver.torn)))
    return seen


@pytest.mark.parametrize(
    ("what", "options"),
    [("count", {}), ("position", {"verify": "full"}), sweep("kind", {}), sweep("count", {"staged": True})],
    ids=str,
)
def test_a_damaged_delta_changes_nothing_on_any_rank(what: str, options: dict[str, Any]) -> None:
    told, seen = run_world(TRAINERS, ENGINES, train, serve, what, options)
    for of_rank in told:
        assert of_rank[:2] + of_rank[3:] == ["whole", "delta", "whole", "delta"]
        assert "trainer rank 1 sent engine rank" in of_rank[2]
        assert "a damaged delta of" in of_rank[2]
        assert "repeat the update, which sends all weights" in of_rank[2]
    assert seen == [[(1, False), (2, False), (2, False), (4, False), (5, False)]] * ENGINES
