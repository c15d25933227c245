"""Many updates of which one in ten loses its answer: what the trainer was told, and what engine ranks have, each time.

A lost answer is one of three: the request has arrived and the answer is lost a moment later, the request arrives when
the trainer has given up, or it never does. The trainer overwrites its weights as soon as it was told an outcome.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import torch

from sglang_reshard.errors import EngineUnreachable, TornWeights
from support.toy import ToyRank
from support.toy_changes import HIDDEN, sharded
from support.toy_serving import receiver_of
from support.world import run_world

DTYPE = torch.float32
_LOST_OF = 10


def train(trainer: Any, updates: int, transport: str, seed: int) -> list[str]:
    """Returns what the trainer was told of each update: "new", "old" or "torn"."""
    chance, sending = random.Random(seed), threading.Lock()  # the engine takes one request after another
    late: list[threading.Thread] = []

    def deliver(request: Any, after_s: float) -> None:
        time.sleep(after_s)
        with sending, suppress(AssertionError):  # engine ranks may explain a failure in different words
            trainer.send(request)

    def send(request: Any) -> Any:
        if chance.randrange(_LOST_OF) or request.update == 1:
            with sending:
                return trainer.send(request)
        how = chance.choice(["answer", "late", "never"])
        if how != "never":
            arrives_s = chance.uniform(0.005, 0.05) if how == "late" else 0.0
            late.append(threading.Thread(target=deliver, args=(request, arrives_s), daemon=True))
            late[-1].start()
        time.sleep(chance.uniform(0.0, 0.004))
        raise EngineUnreachable("a proxy closed the connection")

    sender = trainer.sender(lambda _: send, transport=transport)
    weights, told = sharded(1, DTYPE), []
    for version in range(1, updates + 1):
        _fill(weights, float(version))
        try:
            sender.update(weights.items(), weight_version=str(version), staged=version % 3 == 0)
            told.append("new")
        except EngineUnreachable:
            told.append("old")
        except TornWeights:
            told.append("torn")
        _fill(weights, float("nan"))
    for thread in late:
        thread.join(30)
    return told


def _fill(weights: dict[str, Any], value: float) -> None:
    with torch.no_grad():
        for tensor in weights.values():
            tensor.to_local().fill_(value)


def serve(rank: int, size: int, requests: Any, _updates: int, _transport: str, _seed: int) -> dict[int, str]:
    """Returns how each update has ended that has reached this rank. Raises AssertionError for values of another one."""
    model = ToyRank(rank, size, DTYPE, HIDDEN)
    receiver = receiver_of(model)
    ended, live = {}, 0
    for request in requests:
        output = receiver.update(request)
        ended[request.update] = "new" if output.success else ("torn" if output.torn else "old")
        live = request.update if output.success else live
        # Zeros are padding.
        values = {value for parameter in model.parameters() for value in parameter.unique().tolist()}
        assert output.torn or values - {0.0} == {float(live)}, (
            f"after update {request.update}: {values}, and {live} was live"
        )
        requests.answer(output)
    return ended


def soak(updates: int, transport: str, seed: int = 0, deadline_s: float = 90.0) -> Counter[str]:
    """Returns how often the trainer was told what. Raises AssertionError where engine ranks have something else."""
    trainers, engines = run_world(2, 2, train, serve, updates, transport, seed, deadline_s=deadline_s)
    assert trainers[0] == trainers[1]
    for ended in engines:
        for update, told in enumerate(trainers[0], 1):
            assert ended.get(update, "old") == told, f"update {update}: told {told}, and an engine rank {ended}"
    return Counter(trainers[0])
