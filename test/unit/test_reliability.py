"""Promises of docs/reliability.md that belong to no other test; docs/testing.md lists the tests of all of them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_reshard.control import ControlServer
from sglang_reshard.engine.context import Phase, Vote
from sglang_reshard.engine.update import UpdateExecutor
from sglang_reshard.errors import ConnectionLost, Unsupported
from sglang_reshard.landings.shadow import check_room
from sglang_reshard.protocol import update_channel
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import WRITING
from support.toy import ToyRank, checkpoint
from support.toy_serving import receiver_of
from support.world import run_world


@pytest.mark.parametrize(
    ("others", "torn"), [("write", True), ("do not write", False), ("cannot be asked", True)], ids=str
)
def test_a_rank_that_is_lost_in_a_vote_counts_as_torn_unless_it_learns_that_nobody_writes(
    monkeypatch: pytest.MonkeyPatch, others: str, torn: bool
) -> None:
    monkeypatch.setattr(update_channel, "_DOUBT_S", 1.0)
    executor: Any = SimpleNamespace(last=SimpleNamespace(torn=""))
    with contextlib.closing(ControlServer.open("127.0.0.1")) as server:
        trainer, session = Session.join(server.address, 10), Session.join(server.address, 10)
        with trainer.trainer_channel(1, "trainer rank 0"), contextlib.suppress(ConnectionLost):
            trainer.client.num_keys()  # by now the trainer rank is in the update
            channel = session.engine_channel(1, 0, "engine rank 0")
            lost = Mock(side_effect=ConnectionLost("of this rank"))
            context: Any = SimpleNamespace(channel=channel, request=SimpleNamespace(update=1), all_gather=lost)
            with channel:
                if others == "write":
                    channel.all_gather("connect", 0, 1, "", 10, WRITING)
                if others == "cannot be asked":
                    server.close()
                with pytest.raises(ConnectionLost):
                    UpdateExecutor._vote_before_writing(executor, context, Phase.CONNECT, Vote(), may_write=True)
        trainer.client.close()
        session.client.close()
    assert bool(executor.last.torn) is torn


def test_a_staged_update_for_which_there_is_no_room_is_refused_with_its_size() -> None:
    with pytest.raises(
        Unsupported, match=r"needs 1,152,921,504,606,846,976 bytes in addition .* has [\d,]+ bytes free"
    ):
        check_room(1 << 60, 2, torch.device("cpu"))


def stage_and_not(trainer: Any) -> list[int]:
    sender = trainer.sender()
    weights = checkpoint(1)
    steps = [{"staged": True}, {"staged": True}, {}, {"staged": True}, {"staged": True, "unmap_after": True}]
    staged = [sender.update(weights, **step).engine_ranks[0].staged_bytes for step in steps]
    return staged


def keep_staged_memory(rank: int, size: int, requests: Any) -> list[bool]:
    """Whether the first shadow weights of a staged update are kept after each update."""
    receiver = receiver_of(ToyRank(rank, size))
    memory, kept = None, []
    for number, request in enumerate(requests):
        output = receiver.update(request)
        if number in (0, 3):
            landing: Any = receiver._executor.transfers.last.landing  # type: ignore[union-attr]
            shadow = next(t for n, t in landing.program.targets.items() if t is not landing._apart.live.targets[n])
            memory = StorageWeakRef(shadow.untyped_storage())
            del landing, shadow
        assert memory is not None
        kept.append(not memory.expired())
        requests.answer(output)
    return kept


def test_memory_of_staged_updates_is_kept_until_one_is_not_staged_or_unmaps() -> None:
    (staged,), (kept,) = run_world(1, 1, stage_and_not, keep_staged_memory)
    assert [nbytes > 0 for nbytes in staged] == [True, True, False, True, True]
    assert len(set(staged)) == 2
    assert kept == [True, True, False, True, False]
