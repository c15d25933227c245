"""Updates with a probe: what it finds is told to all trainer ranks, and what cannot be probed is refused or said."""

import msgspec
import pytest

from sglang_reshard import Probe
from sglang_reshard.errors import ProbeMismatch, ReshardError
from sglang_reshard.observability.report import UpdateReport
from support.probed import SEQUENCES, TRAINER, Engine
from support.several_engines import several_engines_sender
from support.toy import ToyRank, checkpoint
from support.toy_serving import answered, receiver_of
from support.world import run_world


class ToyEngine(Engine):
    """Reaches the engine ranks; its numbers are those of `told`."""

    def __init__(self, send, **options):
        super().__init__(**options)
        self._send = send

    def send(self, request):
        return self._send(request)


def reported(call):
    try:
        found = call()
    except ReshardError as error:
        return type(error).__name__, str(error)
    return found


def train(trainer):
    """On each rank: what updates with probes of all kinds came to."""
    engine = ToyEngine(trainer.send) if trainer.rank == 0 else None
    sender = trainer.sender(lambda _: engine.send)
    weights = [(name, tensor.clone()) for name, tensor in checkpoint(1).items()]
    seen, versions = {}, iter(range(100))

    def update(probe, run=sender.update):
        version = next(versions)
        for name, tensor in checkpoint(version % 4).items():
            dict(weights)[name].copy_(tensor)
        found = reported(lambda: run(weights, weight_version=str(version), probe=probe))
        return msgspec.to_builtins(found.probe) if isinstance(found, UpdateReport) else found

    def fails_on_rank_1(sequences):
        if trainer.rank == 1:
            raise ValueError("no forward")
        return TRAINER

    seen["same"] = update(Probe(SEQUENCES, TRAINER))
    seen["own numbers count on rank 0 only"] = update(Probe(SEQUENCES, TRAINER if trainer.rank == 0 else [[0, 0], [0]]))
    if engine is not None:
        engine.told = ((-1.0, -4.0), (-0.5,))
    seen["other"] = update(Probe(SEQUENCES, TRAINER))
    seen["warned"] = update(Probe(SEQUENCES, TRAINER, on_mismatch="warn"))
    seen["no limit"] = update(Probe(SEQUENCES, TRAINER, mean_threshold=None, largest_threshold=2.0))
    seen["in the background"] = update(
        Probe(SEQUENCES, TRAINER), lambda *args, **kw: sender.update_async(*args, **kw).wait()
    )
    if engine is not None:
        engine.meta = {"cached_tokens": 1}
    seen["skipped"] = update(Probe(SEQUENCES, TRAINER))
    seen["no forward"] = update(Probe(SEQUENCES, fails_on_rank_1))
    seen["wrong size"] = update(Probe(SEQUENCES, [[0.0]]))
    sent_by_nobody = trainer.sender()
    seen["nobody to ask"] = update(Probe(SEQUENCES, TRAINER), sent_by_nobody.update)
    seen["function"] = update(
        Probe(SEQUENCES, TRAINER, engine=Engine().generate if trainer.rank == 0 else None), sent_by_nobody.update
    )
    seen["without"] = update(None)
    hasty = trainer.sender(lambda _: engine.send, timeout_s=3)
    alone = Probe(SEQUENCES, TRAINER, timeout_s=1) if trainer.rank == 0 else None
    seen["on rank 0 alone"] = update(alone, hasty.update)
    seen["recorded"] = [s.outcome for s in engine.recorded] if engine is not None else None
    return seen


def serve(rank, size, requests, *_):
    """The versions that were asked for."""
    return [request.weight_version for request in answered(receiver_of(ToyRank(rank, size)), requests)]


@pytest.fixture(scope="module")
def world():
    return run_world(2, 2, train, serve)


@pytest.fixture(scope="module")
def ranks(world):
    return world[0]


def test_all_trainer_ranks_are_told_the_same(ranks):
    first, second = ({**seen, "recorded": None, "on rank 0 alone": None} for seen in ranks)
    assert first == second


def test_equal_numbers_pass_and_are_in_the_report(ranks):
    same = ranks[0]["same"]
    assert same["engine"] == (TRAINER,)
    assert same["trainer"] == TRAINER
    assert (same["mean_difference"], same["largest_difference"], same["tokens"]) == (0.0, 0.0, 3)
    assert same["seconds"] >= same["trainer_seconds"] + same["engine_seconds"] > 0
    assert ranks[0]["own numbers count on rank 0 only"]["largest_difference"] == 0.0
    assert ranks[0]["without"] is None


def test_a_mismatch_names_everything_and_the_weights_are_live(world, ranks):
    for found in (ranks[0]["other"], ranks[0]["in the background"]):
        kind, message = found
        assert kind == "ProbeMismatch"
        for part in (
            "are live and serving",
            "mean difference is 0.6667 nats, more than mean_threshold=0.05",
            "largest difference is 2 nats, more than largest_threshold=1",
            "sequence 0, position 2 (token 4, data parallel rank 0): engine -4, trainer -2",
            "verify='full'",
        ):
            assert part in message, message
    assert "version '2'" in ranks[0]["other"][1]
    assert all("2" in versions for versions in world[1])


def test_a_warning_no_limit_and_a_skipped_probe_return_the_report(ranks):
    for name in ("warned", "no limit"):
        assert ranks[0][name]["largest_difference"] == 2.0
    assert ranks[0]["warned"]["worst"]["position"] == 2
    assert "prefix cache" in ranks[0]["skipped"]["skipped"]
    outcomes = "passed passed mismatch mismatch passed mismatch skipped"
    assert ranks[0]["recorded"] == outcomes.split(), "for the engine's metrics"


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("no forward", "ReshardError", "trainer rank 1: the probe's logprobs function failed: ValueError: no forward"),
        ("wrong size", "Mismatch", "1 entries for 2 sequences"),
        ("nobody to ask", "Unsupported", "On trainer rank 0, pass Probe(engine=...)"),
    ],
)
def test_what_fails_before_the_update_writes_nothing(world, ranks, name, kind, says):
    assert ranks[0][name][0] == kind
    assert says in ranks[0][name][1]
    number = {"no forward": "7", "wrong size": "8", "nobody to ask": "9"}[name]
    assert all(number not in versions for versions in world[1])
    assert ranks[0]["function"]["tokens"] == 3


def test_a_rank_that_does_not_probe_is_named(ranks):
    kind, message = ranks[0]["on rank 0 alone"]
    assert kind == "DeadlineExceeded"
    assert "trainer ranks [1] did not call update with probe= within 4 s" in message
    assert "the weights are live" in message


def train_two(trainer):
    sender, _host = several_engines_sender(trainer, timeout_s=30)
    engines = [ToyEngine(send) if trainer.rank == 0 else None for send in trainer.send_one]
    if trainer.rank == 0:
        engines[1].told = ((-1.0, -9.0), (-0.5,))
    sender.set_engines({name: e.send if e else None for name, e in zip("ab", engines, strict=True)})

    def update(version, **options):
        probe = Probe(SEQUENCES, TRAINER, **options)
        return sender.update(checkpoint(version).items(), weight_version=str(version), probe=probe)

    reports = update(1, on_mismatch="warn")
    with pytest.raises(ProbeMismatch) as differs:
        update(2)
    again = update(3, engine={"b": Engine()} if trainer.rank == 0 else None)
    sender.close()
    outcomes = [{name: r.probe.outcome for name, r in found.items()} for found in (reports, again)]
    return outcomes, str(differs.value), sorted(differs.value.reports)


def serve_one(_rank, _size, requests, *_):
    return serve(0, 1, requests)


def test_engines_are_probed_one_by_one_and_those_that_differ_are_named():
    told, written = run_world(2, 2, train_two, serve_one)
    assert told[0] == told[1]
    (first, again), message, names = told[0]
    assert first == {"a": "passed", "b": "mismatch"}
    assert again == {"a": "passed", "b": "passed"}
    assert names == ["a", "b"]
    assert "b: the mean difference" in message
    assert "a: " not in message
    assert written == [["1", "2", "3"]] * 2
