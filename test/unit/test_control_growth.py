"""Control messages of an update for which nothing has changed: their number, and that the benchmark sends the same."""

from collections import Counter
from contextlib import contextmanager

import pytest

from benchmark.control import words
from benchmark.control.measure import measure
from sglang_reshard.api.multi_engine import MultiEngineSender
from sglang_reshard.control import Address, ControlClient
from sglang_reshard.protocol.session import Session
from sglang_reshard.trainer.collectives import broadcast_message
from support.toy import ToyRank, checkpoint
from support.toy_serving import receiver_of
from support.world import run_world

TRAINERS, ENGINES, UPDATES = 3, 2, 3


@contextmanager
def counted():
    """Counts the operations that this process asks the control server for."""
    seen = Counter()

    def counting(stock):
        def call(client, operation, *arguments, **options):
            seen[operation] += 1
            return stock(client, operation, *arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControlClient, "_call", counting(ControlClient._call))
        yield seen


def train(trainer, verify):
    host = Session.host() if trainer.rank == 0 else None
    address = broadcast_message(host.address if host else None, Address, trainer.group)
    sender = MultiEngineSender(address, trainer_rank=trainer.rank, global_ranks=tuple(range(trainer.size)))
    sender.set_engines(dict(zip("ab", trainer.send_one, strict=True)))
    weights = checkpoint(1)
    for _ in range(UPDATES):
        with counted() as seen:
            sender.update(weights.items(), verify=verify)
    sender.close()
    return seen


def serve(_rank, _size, requests, _verify):
    receiver = receiver_of(ToyRank(0, 1))
    for request in requests:
        with counted() as seen:
            output = receiver.update(request)
        requests.answer(output)
    return seen


def names(said):
    return Counter(word.operation for word in said)


@pytest.mark.parametrize("verify", ["off", "full"])
def test_the_benchmark_sends_what_ranks_send(verify):
    full = verify == "full"
    trainers, engines = run_world(TRAINERS, ENGINES, train, serve, verify)
    expected = [names(words.trainer_rank(UPDATES, rank, TRAINERS, 1, full)) for rank in range(TRAINERS)]
    expected[0] += names(words.asking(UPDATES, TRAINERS, ENGINES)) + names(words.reporting(UPDATES, ENGINES, 1))
    assert trainers == expected
    assert engines == [names(words.engine_rank(UPDATES, engine, 0, 1, full)) for engine in range(ENGINES)]


def test_messages_grow_with_trainer_ranks_and_with_engine_ranks():
    messages = {
        (trainers, engines): measure(trainers, engines, verify=True, updates=1)["messages"]
        for trainers, engines in ((4, 1), (8, 1), (4, 3), (8, 3))
    }
    by_trainers = messages[8, 1] - messages[4, 1]
    assert messages[8, 3] - messages[4, 3] == by_trainers, "no message for each pair of trainer rank and engine"
    assert by_trainers == 4 * 6
