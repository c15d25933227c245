"""Parameters that an update leaves as they are: kept bit for bit, named, and never taken for whole unheard."""

import re

import pytest
import torch
from msgspec.structs import replace

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.engine.update import UpdateExecutor
from sglang_reshard.errors import EngineRefused, EngineUnreachable, TornWeights, Unsupported
from sglang_reshard.landings.checked.whole_model import with_kept
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.may_stay import MayStay
from sglang_reshard.trace.tracer import trace
from support.toy import ToyRank, checkpoint
from support.toy_repacking import Repacking, live_tensors, started, weights
from support.world import run_world
from tools.oracle.replay import replay

LEFT_OUT = {"frozen": ["down", "norm"]}, {"only": ["embed", "qkv", "gate*"]}
DUMMY = {"stock_changes": 1, "stock_loaded": False}


def without(weights, *names):
    return {name: tensor for name, tensor in weights.items() if name not in names}


def sent(version):
    return without(checkpoint(version), "down.weight", "norm.weight")


def serve(rank, size, requests, *_, changes=(), fail_in=None):
    """Answers updates. Returns for each which version each parameter is of, or None.

    changes  of the requests, by their numbers from 0
    """
    model = ToyRank(rank, size)
    model.load_weights(checkpoint(0).items())
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    found, monkey = [], pytest.MonkeyPatch()
    for number, request in enumerate(requests):
        request = replace(request, **dict(changes).get(number, {}))
        if number == fail_in:
            monkey.setattr(UpdateExecutor, "_move", cut)
        requests.answer(receiver.update(request))
        monkey.undo()
        found.append(versions_of(model))
    return found


def cut(*_):
    raise OSError("the wire was cut")


def versions_of(model):
    versions = {}
    for version in range(5):
        stock = ToyRank(model.rank, model.size)
        stock.load_weights(checkpoint(version).items())
        versions |= {n: version for n, p in stock.named_parameters() if torch.equal(p, getattr(model, n))}
    return versions


def train(trainer, options, transport, staged):
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30, transport=transport)
    state = sent(1)
    first = sender.update(state, verify="full", staged=staged, **options)
    for name, tensor in sent(2).items():
        state[name].copy_(tensor)
    second = sender.update(state, verify="full", staged=staged, **options)
    whole = sender.update(checkpoint(3), verify="full", staged=staged, **options)
    again = sender.update_async(sent(3), verify="full", staged=staged, **options).wait()
    sender.close()
    return [(r.kept, r.digest) for r in (first, second, whole, again)], "trace" in second.seconds


@pytest.mark.parametrize(
    ("transport", "options", "staged"),
    [
        ("ipc", LEFT_OUT[0], False),
        ("p2p", LEFT_OUT[1], False),
        ("broadcast", LEFT_OUT[0], False),
        ("ipc", LEFT_OUT[1], True),
        ("p2p", LEFT_OUT[0], True),
    ],
)
def test_what_is_left_out_keeps_its_values_and_is_named(options, transport, staged):
    told, found = run_world(2, 2, train, serve, options, transport, staged)
    assert told[0] == told[1]
    reports, traced_again = told[0]
    assert not traced_again
    kept = ("down", "norm")
    assert [names for names, _ in reports] == [kept, kept, (), kept]
    old, new = dict.fromkeys(kept, 0), dict.fromkeys(kept, 3)
    for of_rank in found:
        moved = dict.fromkeys(("embed", "qkv", "gate_up"), 1)
        assert of_rank[0] == moved | old
        assert of_rank[1] == dict.fromkeys(moved, 2) | old
        assert of_rank[2] == of_rank[3] == dict.fromkeys(moved, 3) | new
    digests = [digest for _, digest in reports]
    assert all(re.fullmatch("[0-9a-f]{16}", digest) for digest in digests)
    assert len(set(digests)) == 4  # that of a part is not that of the whole


def train_for_a_digest(trainer):
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30)
    report = sender.update(sent(1), verify="full", frozen=["down", "norm"])
    sender.close()
    return report.digest


def train_for_an_answer_that_is_lost(trainer):
    def send(request):
        answer = trainer.send(request)
        if request.update == 2:
            raise EngineUnreachable("a proxy closed the connection")
        return answer

    sender = WeightSender.over(trainer.group, send, timeout_s=30)
    found = [sender.update(tensors, verify="full", frozen=["down", "norm"]) for tensors in (checkpoint(1), sent(2))]
    sender.close()
    return [(report.kept, report.digest != "") for report in found]


def test_a_lost_answer_with_a_kept_part_leaves_the_digest_unknown():
    """The engine's own has the versions of that part, which only its answer tells."""
    told, _ = run_world(1, 1, train_for_an_answer_that_is_lost, serve)
    assert told[0] == [((), True), (("down", "norm"), False)]


def train_in_part(trainer, calls):
    """Each of `calls` is what is left out, and the options."""
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30, transport="p2p")

    def update(number, names, options):
        try:
            return sender.update(without(checkpoint(number), *names), **options).kept
        except (EngineRefused, TornWeights) as error:
            return f"{type(error).__name__}: {error}"

    told = [update(number, *call) for number, call in enumerate(calls, start=1)]
    sender.close()
    return told


PART = (("down.weight",), {"frozen": ["down"]})
WHOLE = ((), {})


def test_only_whole_parameters_may_stay_and_only_those_that_are_named():
    calls = [
        (("down.weight",), {}),
        (("down.weight",), {"frozen": ["norm"]}),
        (("down.weight",), {"only": ["d*"]}),
        (("k.weight",), {"frozen": ["*"]}),
    ]
    told, found = run_world(1, 2, train_in_part, serve, calls)
    assert all("down is not written by the loader at all" in message for message in told[0][:3])
    assert "qkv is not written completely" in told[0][3]
    assert found == [[dict.fromkeys(found[0][0], 0)] * 4] * 2


def serve_from_dummy(rank, size, requests, *_):
    return serve(rank, size, requests, changes={n: DUMMY for n in range(4)})


def test_an_engine_that_never_had_a_part_is_not_called_complete():
    told, found = run_world(1, 2, train_in_part, serve_from_dummy, [PART, WHOLE, PART, PART])
    refused, *rest = told[0]
    assert "engine rank 0: down would stay" in refused
    assert refused.count("engine rank 0") == 1
    assert "load_format='dummy'" in refused
    assert rest == [(), ("down",), ("down",)]
    assert found[0][0] == dict.fromkeys(found[0][0], 0)  # nothing was written
    assert found[0][2] == dict.fromkeys(found[0][0], 3) | {"down": 2}


def serve_released(rank, size, requests, *_):
    """The weights are released before the third request, and loaded from disk before the fourth."""
    lost, loaded = DUMMY, {"stock_changes": 2, "stock_loaded": True}
    return serve(rank, size, requests, changes={2: lost, 3: loaded})


def test_weights_that_were_released_have_to_be_sent_again():
    told, _ = run_world(1, 1, train_in_part, serve_released, [WHOLE, PART, PART, PART])
    assert told[0][:2] == [(), ("down",)]
    assert "down would stay" in told[0][2]
    assert told[0][3] == ("down",)


def serve_torn(rank, size, requests, *_):
    return serve(rank, size, requests, fail_in=1)


def test_a_part_that_broke_off_half_written_may_not_stay():
    told, _ = run_world(1, 2, train_in_part, serve_torn, [WHOLE, WHOLE, PART, WHOLE, PART])
    _, torn, refused, healed, kept = told[0]
    assert torn.startswith("TornWeights")
    assert "down would stay" in refused
    assert (healed, kept) == ((), ("down",))


def serve_and_share(rank, size, requests):
    model = ToyRank(rank, size)
    model.load_weights(checkpoint(0).items())
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    for request in requests:
        requests.answer(receiver.update(request))
    with pytest.raises(Unsupported, match="did not write down and others"):
        receiver.live_program()
    return True


def test_an_engine_with_a_kept_part_does_not_pass_it_on():
    run_world(1, 1, train_for_a_digest, serve_and_share)


def test_the_digest_of_a_part_has_the_names_of_the_rest():
    assert with_kept("", ["down"]) == ""
    assert with_kept("00", ["a", "b"]) == with_kept("00", ["b", "a", "b"]) != with_kept("00", ["a"])


def test_patterns_are_of_the_engine_s_names():
    assert not MayStay()("visual.blocks.0.weight")
    assert MayStay(frozen=("visual.*",))("visual.blocks.0.weight")
    assert not MayStay(only=("visual.*",))("visual.blocks.0.weight")
    assert MayStay(only=("model.*",))("visual.blocks.0.weight")
    assert MayStay(frozen=("visual.*",), only=("*",))("visual.blocks.0.weight")


# -- modules that are repacked after loading


def without_layer_1(version, *but):
    given = weights(version, 3, 8)
    return {name: tensor for name, tensor in given.items() if "layers.1." not in name or name in but}


def test_a_repacked_module_stays_as_a_whole_as_it_was_repacked():
    model = started(Repacking(3, 8), weights(0, 3, 8))
    given = without_layer_1(1)
    with pytest.raises(Unsupported, match=r"layers\.1\."):
        trace(model, specs_of(given))
    program = trace(model, specs_of(given), may_stay=MayStay(frozen=("layers.1.*",)))
    assert program.kept == ("layers.1.bound", "layers.1.steps", "layers.1.weight")
    replay(program, given)
    right = live_tensors(started(Repacking(3, 8), weights(0, 3, 8) | given))
    assert [name for name, tensor in live_tensors(model).items() if not torch.equal(tensor, right[name])] == []


def test_a_repacked_module_of_which_a_part_is_sent_is_refused():
    model = started(Repacking(3, 8), weights(0, 3, 8))
    given = without_layer_1(1, "layers.1.left.bound", "layers.1.right.bound")
    assert "layers.1.left.bound" in given
    with pytest.raises(Unsupported, match=r"layers\.1\.\w+ is not written by the loader at all"):
        trace(model, specs_of(given), may_stay=MayStay(frozen=("*",)))


def specs_of(given):
    return [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in given.items()]
