"""Every answer of an engine, with every mark that its ranks may have reached: the trainer is told what is true.

The control server, the senders and the coordinator are the package's; engine ranks are threads that vote like an
engine's. No outcome but the mark WRITTEN is told while one of them may still read the trainer's memory.
"""

import contextlib
import functools
import itertools
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import torch

from sglang_reshard.api.multi_engine import MultiEngineSender
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.control import ControlClient, ControlServer
from sglang_reshard.errors import (
    Aborted,
    EngineRefused,
    EngineUnreachable,
    Mismatch,
    ReshardError,
    TornWeights,
)
from sglang_reshard.extras.request_mail import Mailbox, MailRoom
from sglang_reshard.protocol import update_channel
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, LoraAdapter
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import WRITING, WRITTEN
from sglang_reshard.trainer import coordinator, settlement

RANKS = 2
TIMEOUT_S = 0.6
COPY_S = 0.1  # a copy of the trainer's memory that nothing interrupts
SUCCESS = DistributedUpdateWeightsOutput(success=True, message="the engine's own words")
FAILURE = DistributedUpdateWeightsOutput(success=False, message="the schedulers have not answered")
TORN = msgspec.structs.replace(FAILURE, torn=True)
LOST = EngineUnreachable("a proxy closed the connection")

# How far the ranks are when the engine answers, and what they do then.
ABSENT = "the request has not arrived"
READING = "they read, and have not voted to write"
WRITES = "they write, and end well"
STUCK = "they write, and do not end"
ABORTED = "they have failed while they wrote"
WROTE = "they have written"
DIED = "they have written, and one has died since"

REPORT = None, "the engine's own words"
FOUND = None, "the outcome comes from the control server"
OLD, HAVE_WRITTEN = "the old weights keep serving", "All engine ranks had already written the new weights"
REFUSED = EngineRefused, FAILURE.message
IS_TORN = TornWeights, "repeat the update"
# (error or None for a report, its words), by answer: success, failure, failure and torn, none, one that comes too late
TABLE = {
    ABSENT: [(Mismatch, OLD), REFUSED, IS_TORN, (EngineUnreachable, OLD), (Aborted, OLD)],
    READING: [(Mismatch, OLD), REFUSED, IS_TORN, (EngineUnreachable, OLD), (Aborted, OLD)],
    WRITES: [FOUND, FOUND, IS_TORN, FOUND, IS_TORN],
    STUCK: [IS_TORN] * 5,
    ABORTED: [IS_TORN] * 5,
    WROTE: [REPORT, FOUND, IS_TORN, FOUND, (Aborted, HAVE_WRITTEN)],
    DIED: [
        REPORT,
        (EngineRefused, HAVE_WRITTEN),
        IS_TORN,
        (EngineUnreachable, HAVE_WRITTEN),
        (Aborted, HAVE_WRITTEN),
    ],
}
ANSWERS = {"success": SUCCESS, "failure": FAILURE, "torn": TORN, "none": LOST, "late": SUCCESS}
CELLS = [(ranks, answer, row[i]) for ranks, row in TABLE.items() for i, answer in enumerate(ANSWERS)]
ANSWERS["silent"] = SUCCESS


class Engine:
    """An engine whose ranks get as far as `ranks` says, and that answers `answer`.

    state  of its weights: "old", "new", "torn"
    """

    def __init__(self, ranks, answer):
        self._ranks, self._answer = ranks, answer
        self._lock, self._arrived = threading.Lock(), threading.Semaphore(0)
        self._answered, self.told = threading.Event(), threading.Event()
        self._threads, self.reading, self.state = [], 0, "old"

    def send(self, request):
        self._threads = [threading.Thread(target=self._take, args=(request, rank)) for rank in range(RANKS)]
        for thread in self._threads:
            thread.start()
        if self._ranks != ABSENT:
            assert all([self._arrived.acquire(timeout=10) for _ in range(RANKS)])
        answer = ANSWERS[self._answer]
        if self._answer == "silent":
            self.told.wait(30)
        if self._answer == "late":
            with ControlClient(request.address, 10) as client:
                client.cancel(f"update/{request.update}/{request.engine}", "trainer rank 1 failed")
            self.told.wait(10)
        self._answered.set()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def join(self):
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _take(self, request, rank):
        if self._ranks == ABSENT:
            self.told.wait(10)
        session = Session.join(request.address, 10)
        channel, aborted = session.engine_channel(request.update, request.engine, f"engine rank {rank}"), []
        try:
            with channel:
                channel.on_abort(aborted.append)
                self._count(1)
                try:
                    self._vote(channel, rank, aborted)
                finally:
                    self._count(-1)
            if self._ranks == DIED:
                session.client.cancel(channel.scope, "engine rank 1 disconnected unexpectedly")
        except Aborted:
            pass
        finally:
            if self._ranks in (WROTE, DIED):
                self._arrived.release()
            session.client.close()

    def _count(self, number):
        with self._lock:
            self.reading += number

    def _vote(self, channel, rank, aborted):
        if self._ranks == READING:
            self._arrived.release()
            self._copy(aborted, self.told)
        channel.all_gather("connect", rank, RANKS, "", 10, WRITING)
        self.state = "torn"
        if self._ranks == ABORTED:
            channel.abort("engine rank 1: a copy failed")
        if self._ranks in (WRITES, STUCK, ABORTED):
            self._arrived.release()
            self._copy(aborted, self._answered if self._ranks == WRITES else self.told)
        if rank == 0:
            channel.put_outcome(DistributedUpdateWeightsOutput(success=True, message=""))
        channel.all_gather("commit", rank, RANKS, "", 10, WRITTEN)
        self.state = "new"

    def _copy(self, aborted, event):
        end = time.monotonic() + 10
        while not aborted and not event.is_set() and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(COPY_S)


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    for module in (coordinator, settlement):
        monkeypatch.setattr(module, "ANSWER_S", 0.4)


WEIGHTS = {"a": torch.ones(4)}


def to_one(address, engine, **options):
    sender = WeightSender.within(
        Session.join(address), trainer_rank=0, global_ranks=(0,), send=engine.send, timeout_s=TIMEOUT_S
    )
    return sender, lambda: sender.update(WEIGHTS, weight_version="2", **options)


def to_several(address, engine, on_failure):
    good = Engine(WROTE, "success")
    sender = MultiEngineSender(address, trainer_rank=0, global_ranks=(0,), timeout_s=TIMEOUT_S)
    sender.set_engines({"good": good.send, "it": engine.send})

    def update():
        reports = sender.update(WEIGHTS, weight_version="2", on_failure=on_failure)
        good.join()
        assert reports["good"].success
        assert list(sender.excluded) == ([] if reports["it"].success else ["it"])
        return reports["it"]

    return sender, update


def to_one_that_pulls(address, engine):
    """Requests and answers wait on the control server, as between an engine that shares its weights and another."""
    room, mailbox = MailRoom(address, 10), Mailbox(address, "it", 10)
    room.wait(1, 10)
    room.receivers()

    def take():
        with contextlib.closing(mailbox), contextlib.suppress(EngineUnreachable):
            mailbox.answer(engine.send(mailbox.request(10)))

    threading.Thread(target=take, daemon=True).start()
    sender, update = to_one(address, SimpleNamespace(send=functools.partial(room.send, "it")))

    def update_and_close():
        with contextlib.closing(room):
            return update()

    return sender, update_and_close


WAYS = {
    "one engine": to_one,
    "one that pulls": to_one_that_pulls,
    "an adapter": lambda address, engine: to_one(address, engine, lora=[LoraAdapter("style", "{}")]),
    "several, raise": lambda address, engine: to_several(address, engine, "raise"),
    "several, exclude": lambda address, engine: to_several(address, engine, "exclude"),
}


def cases():
    """`make test` tries all cells with several engines, and with one, whose sender raises all errors, a lost answer."""
    for way, (ranks, answer, outcome) in itertools.product(WAYS, CELLS):
        quick = way == "several, exclude" or (way, answer) == ("one engine", "none")
        marks = [] if quick else [pytest.mark.sweep]
        yield pytest.param(way, ranks, answer, outcome, id=f"{answer}, {ranks}-{way}", marks=marks)


def told_by(update, engine):
    """Returns the error's type, or None, the words that the trainer is told, and how many ranks may still read."""
    try:
        report = update()
        reading = engine.reading
    except ReshardError as error:
        return type(error), str(error), engine.reading
    if report.success:
        return None, report.message, reading
    name, _, words = report.message.partition(": ")
    return {kind.__name__: kind for kind, _ in itertools.chain(*TABLE.values()) if kind}[name], words, reading


@pytest.mark.parametrize(("way", "ranks", "answer", "outcome"), [*cases()])
def test_the_trainer_is_told_what_has_become_of_the_weights(way, ranks, answer, outcome):
    engine = Engine(ranks, answer)
    with contextlib.closing(ControlServer.open("127.0.0.1")) as server:
        sender, update = WAYS[way](server.address, engine)
        kind, words, reading = told_by(update, engine)
        engine.told.set()
        engine.join()
        sender.close()
    expected, said = outcome
    if way == "one that pulls" and expected is EngineUnreachable:
        expected = EngineRefused  # it has left
    assert (kind, said in words) == (expected, True), words
    written = kind is None or HAVE_WRITTEN in words
    if kind is TornWeights:
        assert engine.state == "torn" or answer == "torn"
    else:
        assert engine.state == ("new" if written else "old")
    if engine.state != "new":
        assert not reading, "the trainer may change its memory now"


@pytest.mark.parametrize(("ranks", "words"), [(READING, OLD), (WROTE, HAVE_WRITTEN)])
def test_a_trainer_that_waits_in_vain_is_told_so_too(monkeypatch, ranks, words):
    monkeypatch.setattr(update_channel, "_RESULT_S", 1.0)
    engine = Engine(ranks, "silent")
    with contextlib.closing(ControlServer.open("127.0.0.1")) as server:
        sender, update = to_one(server.address, engine)
        with pytest.raises(Aborted, match=f"update 1 did not end within 3 s; look at the logs of .*{words}"):
            update()
        engine.told.set()
        engine.join()
        sender.close()
