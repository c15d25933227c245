"""Updates whose answer never reaches the trainer: what it is told is true, whatever the engine does later.

The request arrives late or its ranks are slow, the trainer gives up and changes its weights in place, as the next
training step does.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from sglang_reshard import ModuleReceiver, ModuleSender
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.errors import DeadlineExceeded, EngineUnreachable, TornWeights
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput
from sglang_reshard.protocol.update_channel import ANSWER_S
from support.ready import CONTEXT
from support.revocation.soak import soak
from support.revocation.stories import SOAKED
from support.toy import ToyRank
from support.toy_changes import HIDDEN, become, sharded, weights_of
from support.toy_serving import receiver_of
from support.world import run_world

DTYPE = torch.bfloat16
NAN = float("nan")


def train(trainer, transport, options, timeout_s, _before_s, _moving_s, failure):
    """Three updates, of which the second one's answer is lost, or is a premature `failure`. Returns what the trainer
    was told of each.
    """
    done = threading.Event()

    def send(request):
        if request.update == 2:
            threading.Thread(target=lambda: (trainer.send(request), done.set()), daemon=True).start()
            time.sleep(0.5)
            if failure:
                return DistributedUpdateWeightsOutput(success=False, message=failure)
            raise EngineUnreachable("the engine did not answer: a proxy closed the connection")
        if request.update == 3:
            done.wait(30)
        return trainer.send(request)

    sender = trainer.sender(lambda _: send, timeout_s=timeout_s, transport=transport)
    weights, told = sharded(1, DTYPE), []
    for version in (1, 2, 3):
        become(weights, version, DTYPE)
        try:
            told.append(sender.update(weights.items(), weight_version=str(version), **options).message)
        except (EngineUnreachable, TornWeights) as error:
            told.append(error)
        with torch.no_grad():
            for tensor in weights.values():
                tensor.to_local().fill_(NAN)
    return [f"{type(t).__name__}: {t}" if isinstance(t, Exception) else t for t in told]


def serve(rank, size, requests, _transport, _options, _timeout_s, before_s, moving_s, _failure):
    """Returns success, torn, and the version whose weights are live, after each update."""
    model = ToyRank(rank, size, DTYPE, HIDDEN)
    receiver, after = receiver_of(model), []
    move = receiver._executor._move

    def slowly(context):
        if context.request.update == 2:
            time.sleep(moving_s)
        move(context)

    receiver._executor._move = slowly
    for request in requests:
        if request.update == 2:
            time.sleep(before_s)
        output = receiver.update(request)
        live = [version for version in (1, 2, 3) if not model.differing(weights_of(version, DTYPE))]
        after.append((output.success, output.torn, live))
        requests.answer(output)
    return after


def run(transport, options, *, timeout_s=20.0, before_s=0.0, moving_s=0.0, failure=""):
    """before_s, moving_s: how long engine ranks take before they begin with update 2, and to move it."""
    told, served = run_world(2, 2, train, serve, transport, options, timeout_s, before_s, moving_s, failure)
    assert told[0] == told[1]
    return told[0], served[0]


TRANSPORTS = [
    pytest.param("auto"),
    pytest.param("p2p", marks=pytest.mark.sweep),
    pytest.param("broadcast", marks=pytest.mark.sweep),
]


LOST = "the engine's answer is lost"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("options", [{}, pytest.param({"verify": "full"}, marks=pytest.mark.sweep)])
def test_a_request_that_arrives_after_the_trainer_has_given_up_writes_nothing(case, transport, options):
    with case(f"{LOST}, its request is late", "announce", transport) as row:
        told, served = run(transport, options, before_s=2.0)
        assert told[1].startswith("EngineUnreachable: the engine did not answer")
        assert "no engine rank had begun to write: the old weights keep serving" in told[1]
        assert served == [(True, False, [1]), (False, False, [1]), (True, False, [3])]
        row.outcome = "old weights; the next update made it good"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_staged_update_that_is_given_up_is_not_committed(case, transport):
    with case(LOST, "move, staged", transport) as row:
        told, served = run(transport, {"staged": True}, moving_s=2.0)
        assert "the old weights keep serving" in told[1]
        assert served == [(True, False, [1]), (False, False, [1]), (True, False, [3])]
        row.outcome = "old weights; the next update made it good"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_trainer_waits_for_ranks_that_write_and_learns_of_their_success(case, transport):
    with case(LOST, "move", transport) as row:
        told, served = run(transport, {}, moving_s=2.0)
        assert "the engine's answer was lost" in told[1]
        assert served == [(True, False, [1]), (True, False, [2]), (True, False, [3])]
        row.outcome = "new weights, reported"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failure_that_the_engine_reports_while_its_ranks_write_is_no_outcome(case, transport):
    with case("the engine reports a failure, and its ranks go on", "move", transport) as row:
        told, served = run(transport, {}, moving_s=2.0, failure="the engine's schedulers have not answered")
        assert "the engine answered otherwise (the engine's schedulers have not answered)" in told[1]
        assert served == [(True, False, [1]), (True, False, [2]), (True, False, [3])]
        row.outcome = "new weights, reported"


def test_ranks_that_write_for_too_long_are_torn_and_the_trainer_knows_it(case):
    with case(f"{LOST}, engine ranks write past the deadline", "move", "ipc") as row:
        told, served = run("auto", {}, timeout_s=3.0, moving_s=5.0)
        assert told[1].startswith("TornWeights: engine ranks had begun to write update 2")
        assert served[1][:2] == (False, True)
        assert served[2] == (True, False, [3])
        row.outcome = "torn, declared; the next update made it good"


def train_an_interrupted_rank(trainer):
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30)
    began = time.monotonic()
    with pytest.raises(TornWeights, match="interrupted"):
        sender.update(sharded(1, DTYPE).items())
    sender.close()
    return time.monotonic() - began


def serve_until_interrupted(rank, size, requests):
    receiver = receiver_of(ToyRank(rank, size, DTYPE, HIDDEN))

    def interrupt(_context):
        raise KeyboardInterrupt

    receiver._executor._move = interrupt
    for request in requests:
        with pytest.raises(KeyboardInterrupt):
            receiver.update(request)
        requests.answer(DistributedUpdateWeightsOutput(success=False, message="interrupted", torn=bool(receiver.torn)))


def test_an_engine_rank_that_is_interrupted_while_it_writes_has_left_the_update():
    told, _ = run_world(1, 1, train_an_interrupted_rank, serve_until_interrupted)
    assert told[0] < ANSWER_S


def collect(asked, answers):
    """A data collector that is busy for longer than its trainer waits."""
    model = torch.nn.Linear(64, 64, bias=False)
    receiver = ModuleReceiver(model)
    receiver.init(asked.get(timeout=60), timeout_s=20)
    answers.put(None)
    answers.put((receiver.receive(20), model.weight.unique().tolist()))
    asked.get(timeout=60)  # a long rollout, over now
    answers.put((receiver.poll_and_apply(0.5), receiver.version, model.weight.unique().tolist()))
    asked.get(timeout=60)
    answers.put((receiver.receive(20), model.weight.unique().tolist()))
    receiver.close()


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("transport", ["auto", pytest.param("ipc", marks=pytest.mark.sweep)])
def test_a_collector_that_comes_late_does_not_take_what_was_given_up(case, transport):
    with case("a collector takes its weights when the trainer has given up", "announce", transport) as row:
        _collector_comes_late(transport)
        row.outcome = "old weights; the next update made it good"


def _collector_comes_late(transport):
    asked, answers = CONTEXT.Queue(), CONTEXT.Queue()
    process = CONTEXT.Process(target=collect, args=(asked, answers), daemon=True)
    process.start()
    try:
        sender, model = ModuleSender(timeout_s=8, transport=transport), torch.nn.Linear(64, 64, bias=False)
        asked.put(sender.metadata)
        answers.get(timeout=60)
        torch.nn.init.constant_(model.weight, 1.0)
        sender.update(model, weight_version="one")
        assert answers.get(timeout=60) == ("one", [1.0])
        torch.nn.init.constant_(model.weight, 2.0)
        with pytest.raises(DeadlineExceeded, match="the old weights keep serving"):
            sender.update(model, weight_version="two")
        torch.nn.init.constant_(model.weight, -777.0)  # the trainer goes on
        asked.put(None)
        assert answers.get(timeout=60) == (False, "one", [1.0])
        torch.nn.init.constant_(model.weight, 3.0)
        asked.put(None)
        sender.update(model, weight_version="three")
        assert answers.get(timeout=60) == ("three", [3.0])
        sender.close()
        process.join(20)
    finally:
        if process.is_alive():
            process.kill()


@pytest.mark.parametrize(
    ("updates", "transport"),
    [(100, "auto"), *(pytest.param(updates, name, marks=pytest.mark.sweep) for name, updates in SOAKED.items())],
)
def test_engine_ranks_have_what_the_trainer_was_told_whatever_is_lost(case, updates, transport):
    with case(f"one in ten answers of {updates:,} updates is lost", "any", transport) as row:
        told = soak(updates, transport, deadline_s=500)
        assert sum(told.values()) == updates
        assert told["new"] > 0.9 * updates - 50
        assert told["old"] > 0
        row.outcome = "engine ranks have what the trainer was told"
