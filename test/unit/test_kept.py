"""Parameters, and parts of fused ones, that an update leaves as they are: bit for bit, named, never taken for whole."""

import fnmatch
import re
from functools import partial
from types import MappingProxyType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sglang_reshard.engine.update import UpdateExecutor
from sglang_reshard.errors import EngineRefused, EngineUnreachable, TornWeights, Unsupported
from sglang_reshard.landings.checked.whole_model import with_kept
from sglang_reshard.trace.initial_values import keep_initial_values
from sglang_reshard.trace.kept import patterns_of
from sglang_reshard.trace.program import MayStay
from sglang_reshard.trace.stock_load import EngineStart
from sglang_reshard.trace.tracer import trace
from support.sweep import examples
from support.toy import ToyRank, checkpoint
from support.toy_repacking import Repacking, live_tensors, started, weights
from support.toy_serving import answered, receiver_of
from support.world import run_world
from tools.oracle.replay import replay
from toy_loader import specs_of

TOWER, PARTS = ("down.weight", "norm.weight"), ("k.weight", "v.weight")
KEPT = tuple(f"qkv[{name}]" for name in PARTS)
DUMMY = {"stock_changes": 1, "stock_loaded": False}


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def on(tensors):
    """The start of an engine on this checkpoint."""
    return lambda: EngineStart(specs_of(tensors))


def loaded(rank, size, tensors):
    model = ToyRank(rank, size)
    model.load_weights(tensors.items())
    return model


def serve(rank, size, requests, *_, changes=MappingProxyType({}), fail_in=None):
    """Answers updates. Returns for each what is live. `changes`: of the requests, by their numbers from 0."""
    model = loaded(rank, size, checkpoint(0))
    receiver = receiver_of(model, start=on(checkpoint(0)))
    found, monkey = [], pytest.MonkeyPatch()
    for number, request in enumerate(requests):
        if number == fail_in:
            monkey.setattr(UpdateExecutor, "_move", cut)
        requests.answer(receiver.update(replace(request, **changes.get(number, {}))))
        monkey.undo()
        found.append(values(model))
    return found


def values(model):
    return {name: parameter.tolist() for name, parameter in model.named_parameters()}


def cut(*_):
    raise OSError("the wire was cut")


def train(trainer, calls, transport="p2p"):
    """Each of `calls` is what is left out of the next version, and the options. The last one is asynchronous."""
    sender = trainer.sender(transport=transport)

    def update(number, names, options):
        tensors = without(checkpoint(number), *names)
        try:
            report = sender.update(tensors, **options) if number < 4 else sender.update_async(tensors, **options).wait()
            return report.kept, report.digest
        except (EngineRefused, TornWeights) as error:
            return f"{type(error).__name__}: {error}"

    return [update(number, *call) for number, call in enumerate(calls, start=1)]


FROZEN = (TOWER, {"frozen": ["down", "norm"]}, ("down", "norm"))
ONLY = (TOWER, {"only": ["embed", "qkv", "gate*"]}, ("down", "norm"))
OF_FUSED = (PARTS, {"frozen": ["[kv].weight"]}, KEPT)


@pytest.mark.parametrize(
    ("left_out", "transport", "staged", "engines"),
    [
        (FROZEN, "ipc", False, 2),
        (ONLY, "p2p", False, 2),
        (FROZEN, "broadcast", False, 2),
        (ONLY, "ipc", True, 2),
        (OF_FUSED, "ipc", False, 4),
        (OF_FUSED, "p2p", False, 2),
        (OF_FUSED, "p2p", True, 4),
        (OF_FUSED, "broadcast", True, 1),
    ],
)
def test_what_is_left_out_keeps_its_values_and_is_named(left_out, transport, staged, engines):
    """Four engine ranks replicate two heads of k and v."""
    names, options, kept = left_out
    options = {"verify": "full", "staged": staged, **options}
    told, found = run_world(
        2, engines, train, serve, [(names, options), (names, options), ((), options), (names, options)], transport
    )
    assert told[0] == told[1]
    assert [of_update for of_update, _ in told[0]] == [kept, kept, (), kept]
    digests = [digest for _, digest in told[0]]
    assert all(re.fullmatch("[0-9a-f]{16}", digest) for digest in digests)
    assert len(set(digests)) == 4  # that of a part is not that of the whole
    for rank, live in enumerate(found):
        for number, brought_by in enumerate((0, 0, 3, 3)):
            left = {name: checkpoint(brought_by)[name] for name in names}
            assert live[number] == values(loaded(rank, engines, checkpoint(number + 1) | left))


def train_for_a_digest(trainer, left_out=FROZEN):
    names, options, _ = left_out
    return train(trainer, [(names, {"verify": "full", **options})])


@pytest.mark.parametrize("left_out", [FROZEN, OF_FUSED])
def test_the_digest_of_a_part_does_not_depend_on_the_sizes_of_either_side(left_out):
    one, _ = run_world(1, 1, train_for_a_digest, serve, left_out)
    other, _ = run_world(2, 4, train_for_a_digest, serve, left_out)
    assert one[0] == other[0] == other[1]
    assert with_kept("", ["down"]) == ""
    assert with_kept("00", ["a", "b"]) == with_kept("00", ["b", "a", "b"]) != with_kept("00", ["a"])


def train_for_an_answer_that_is_lost(trainer):
    def send(request):
        answer = trainer.send(request)
        if request.update == 2:
            raise EngineUnreachable("a proxy closed the connection")
        return answer

    sender = trainer.sender(lambda _: send)
    found = [
        sender.update(tensors, verify="full", frozen=["down", "norm"])
        for tensors in (checkpoint(1), without(checkpoint(2), *TOWER))
    ]
    return [(report.kept, report.digest != "") for report in found]


def test_a_lost_answer_with_a_kept_part_leaves_the_digest_unknown():
    """The engine's own has the versions of that part, which only its answer tells."""
    told, _ = run_world(1, 1, train_for_an_answer_that_is_lost, serve)
    assert told[0] == [((), True), (("down", "norm"), False)]


def serve_and_share(rank, size, requests):
    receiver = receiver_of(loaded(rank, size, checkpoint(0)))
    list(answered(receiver, requests))
    with pytest.raises(Unsupported, match="did not write down and others"):
        receiver.live_program()
    return True


def test_an_engine_with_a_kept_part_does_not_pass_it_on():
    run_world(1, 1, train_for_a_digest, serve_and_share)


def test_patterns_are_of_the_engine_s_names():
    assert not MayStay()("visual.blocks.0.weight")
    assert MayStay(frozen=("visual.*",))("visual.blocks.0.weight")
    assert not MayStay(only=("visual.*",))("visual.blocks.0.weight")
    assert MayStay(only=("model.*",))("visual.blocks.0.weight")
    assert MayStay(frozen=("visual.*",), only=("*",))("visual.blocks.0.weight")


@pytest.mark.parametrize(
    ("left_out", "may_stay", "why"),
    [
        ("down.weight", MayStay(), "down is not written by the loader at all"),
        ("down.weight", MayStay(("norm",)), "down is not written by the loader at all"),
        ("down.weight", MayStay(only=("d*",)), "down is not written by the loader at all"),
        ("k.weight", MayStay(("*",)), "qkv is not written completely"),
    ],
)
def test_only_what_is_named_may_stay_and_parts_only_where_the_engine_s_own_checkpoint_shows_them(
    left_out, may_stay, why
):
    sent, model = specs_of(without(checkpoint(1), left_out)), loaded(0, 1, checkpoint(0))
    with pytest.raises(Unsupported, match=why):
        trace(model, sent, may_stay=may_stay)
    if may_stay.frozen == ("*",):
        with pytest.raises(Unsupported, match=r"frozen= names the tensors .* model_path; .*\(no folder\)"):
            trace(model, sent, lambda: EngineStart(None, "no folder"), may_stay=may_stay)


def test_the_refusal_names_what_is_missing_and_the_way_out():
    model, sent = loaded(0, 2, checkpoint(0)), specs_of(without(checkpoint(1), *PARTS, "norm.weight"))
    for frozen in ((), ("qkv", "norm"), ("q.weight",), ("k.weight",)):
        with pytest.raises(Unsupported, match=r"qkv is not written completely: \d+ of its 480") as refused:
            trace(model, sent, on(checkpoint(0)), may_stay=MayStay(frozen))
        assert re.search(r"checkpoint fills it from (k\.weight, )?v\.weight\. Compare", str(refused.value))
        cure = re.search(r"pass frozen=\[(.*?)\] to the update", str(refused.value))
        names = tuple(name.strip("'") for name in cure[1].split(", "))
        program = trace(model, sent, on(checkpoint(0)), may_stay=MayStay(names))
        assert program.kept == ("norm" if "norm" in frozen else "norm[norm.weight]", *KEPT)
        assert program.left_alone == ()


def test_parts_are_named_by_frozen_alone():
    """Of only= a fused parameter is either to be written, or as a whole not."""
    sent = specs_of(without(checkpoint(1), *PARTS))
    for only in ("gate*", "qkv", "q.weight"):
        with pytest.raises(Unsupported, match="qkv is not written completely"):
            trace(loaded(0, 1, checkpoint(0)), sent, on(checkpoint(0)), may_stay=MayStay(only=(only,)))


class Stage(torch.nn.Module):
    """The first of two stages of a pipeline, with a layer of `layers.0` and `layers.1`."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.layers[0].ab = torch.nn.Parameter(torch.zeros(2))

    def load_weights(self, tensors):
        for name, tensor in tensors:
            if name.startswith("layers.0"):
                self.layers[0].ab.data["ab".index(name[-1]) :][:1].copy_(tensor)


def test_the_way_out_is_for_all_engine_ranks():
    """Others miss the same in layers of theirs, and the trainer is told the error of one."""
    whole = {f"layers.{n}.{name}": torch.ones(1) for n in range(2) for name in "ab"}
    with pytest.raises(Unsupported, match=r"pass frozen=\['layers\.\[01\]\.b'\] to the update .*from layers\.0\.b\. "):
        trace(Stage(), specs_of({name: whole[name] for name in ("layers.0.a", "layers.1.a")}), on(whole))


# -- what nothing has brought


PART = (PARTS, {"frozen": PARTS})
TOWER_PART = (TOWER, {"frozen": ["down", "norm"]})
WHOLE = ((), {})
QKV = (("q.weight", *PARTS), {"frozen": ["qkv"]})


@pytest.mark.parametrize(("part", "kept"), [(PART, KEPT), (TOWER_PART, ("down", "norm"))])
def test_what_an_engine_never_had_is_refused(part, kept):
    told, found = run_world(
        1, 2, train, partial(serve, changes=dict.fromkeys(range(4), DUMMY)), [part, WHOLE, part, part]
    )
    assert f"engine rank 0: {', '.join(kept)} would stay as they are, and nothing has brought them" in told[0][0]
    assert told[0][0].count("engine rank 0") == 1
    assert "load_format='dummy'" in told[0][0]
    assert [names for names, _ in told[0][1:]] == [(), kept, kept]
    assert found[0][0] == values(loaded(0, 2, checkpoint(0)))  # nothing was written


@pytest.mark.parametrize(("part", "kept"), [(PART, KEPT), (TOWER_PART, ("down", "norm"))])
def test_what_was_released_has_to_be_brought_again(part, kept):
    """The weights are released before the third request, and loaded from disk before the fourth."""
    released = {2: DUMMY, 3: {"stock_changes": 2, "stock_loaded": True}}
    told, _ = run_world(1, 1, train, partial(serve, changes=released), [WHOLE, part, part, part])
    assert [names for names, _ in told[0][:2]] == [(), kept]
    assert f"{', '.join(kept)} would stay" in told[0][2]
    assert told[0][3][0] == kept


@pytest.mark.parametrize(
    ("torn", "then", "unsound"),
    [
        (WHOLE, PART, "qkv[k.weight], qkv[v.weight]"),
        (PART, QKV, "qkv"),
        (WHOLE, TOWER_PART, "down, norm"),
        (PART, PART, ""),
        (QKV, PART, ""),
    ],
)
def test_of_a_torn_update_only_what_it_did_not_write_may_stay(torn, then, unsound):
    told, _ = run_world(1, 2, train, partial(serve, fail_in=1), [WHOLE, torn, then, WHOLE, PART])
    assert told[0][1].startswith("TornWeights")
    assert f"engine rank 0: {unsound} would stay" in told[0][2] if unsound else told[0][2][0] == KEPT
    assert [names for names, _ in told[0][3:]] == [(), KEPT]


class Thirds(torch.nn.Module):
    """A fused parameter of three parts, of which no checkpoint has the last."""

    def __init__(self):
        super().__init__()
        self.fused = torch.nn.Parameter(torch.arange(6.0))

    def load_weights(self, tensors):
        for name, tensor in tensors:
            self.fused.data["ab".index(name) * 2 :][:2].copy_(tensor)


def test_a_kept_part_is_not_given_its_initial_value():
    """As the part is that a start on dummy weights has overwritten, and that no checkpoint has."""
    model, both = Thirds(), {"a": torch.ones(2), "b": torch.ones(2)}
    with keep_initial_values(model), torch.no_grad():
        model.fused.uniform_(-1e-3, 1e-3)
    replay(trace(model, specs_of(both), on(both)), both)
    sent = {"a": torch.full((2,), 3.0)}
    program = trace(model, specs_of(sent), on(both), may_stay=MayStay(("b",)))
    replay(program, sent)
    assert (program.kept, program.left_alone) == (("fused[b]",), ("fused",))
    assert model.fused.tolist() == [3, 3, 1, 1, 4, 5]


# -- parts that cannot stay by themselves


class Scaled(torch.nn.Module):
    """Two fused weights with a scale for each, or one for both: then the last one counts.

    joins  it waits for both weights
    """

    def __init__(self, scales, dtype=torch.float32, joins=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.ones(scales))
        self.joins = joins

    def load_weights(self, tensors):
        tensors = dict(tensors)
        for number, name in enumerate(("a", "b")):
            if f"{name}.weight" in tensors and not self.joins:
                self.weight.data[number * 2 :][:2].copy_(tensors[f"{name}.weight"])
            if f"{name}.scale" in tensors:
                self.scale.data[number % len(self.scale) :][:1].copy_(tensors[f"{name}.scale"])
        if self.joins and {"a.weight", "b.weight"} <= tensors.keys():
            self.weight.data.copy_(torch.cat((tensors["a.weight"], tensors["b.weight"])))


SCALED = {f"{name}.{kind}": torch.ones(n) for name in "ab" for kind, n in (("weight", 2), ("scale", 1))}


def test_a_part_that_shares_its_scale_with_what_is_sent_may_not_stay():
    sent = specs_of(without(SCALED, "b.weight", "b.scale"))
    program = trace(Scaled(2), sent, on(SCALED), may_stay=MayStay(("b.*",)))
    assert program.kept == ("scale[b.scale]", "weight[b.weight]")
    with pytest.raises(Unsupported, match=r"weight\[b\.weight\] may not stay .* shares elements of scale with"):
        trace(Scaled(1), sent, on(SCALED), may_stay=MayStay(("b.*",)))
    with pytest.raises(Unsupported, match=r"from b\.weight\. Send these too: no part .* shares elements of scale with"):
        trace(Scaled(1), sent, on(SCALED))


INT8 = {name: t.to(torch.int8) if name.endswith("weight") else t for name, t in SCALED.items()}


@pytest.mark.parametrize("start", [on(INT8), None], ids=["its checkpoint", "unknown"])
@pytest.mark.parametrize(("half", "other"), [("weight", "scale"), ("scale", "weight")])
@pytest.mark.parametrize(("names", "frozen"), [("b", "b.*"), ("ab", "?.{half}"), ("ab", "{half}")])
def test_of_a_quantized_weight_all_stays_or_nothing(start, half, other, names, frozen):
    """As int8 values that stay would be multiplied by new scales."""
    allowed, unsent = MayStay((frozen.format(half=half),)), [f"{name}.{half}" for name in names]
    assert trace(Scaled(2), specs_of(without(SCALED, *unsent)), on(SCALED), may_stay=allowed).kept
    why = rf"replaces .*[ab]\.{other} of the same quantized" if start or "." not in frozen else "is not written"
    with pytest.raises(Unsupported, match=why):
        trace(Scaled(2, torch.int8), specs_of(without(INT8, *unsent)), start, may_stay=allowed)


def test_all_of_a_quantized_weight_may_stay_and_so_may_its_bias():
    model, sent = Scaled(2, torch.int8), specs_of(without(INT8, "b.weight", "b.scale"))
    model.bias = torch.nn.Parameter(torch.zeros(2))
    program = trace(model, sent, on(INT8), may_stay=MayStay(("b.*", "bias")))
    assert program.kept == ("bias", "scale[b.scale]", "weight[b.weight]")


def test_a_part_that_the_loader_writes_together_with_what_is_sent_may_not_stay():
    """As a loader that concatenates tensors once it has both: what is sent would not be written either."""
    sent = specs_of(without(SCALED, "b.weight"))
    for frozen in ((), ("b.weight",), ("?.weight",)):
        with pytest.raises(Unsupported, match=r"Send these too: no part .* the loader writes a\.weight together"):
            trace(Scaled(2, joins=True), sent, on(SCALED), may_stay=MayStay(frozen))


class Cut(torch.nn.Module):
    """Takes rows that a checkpoint has in one tensor, or a trainer in several."""

    def __init__(self):
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(4))

    def load_weights(self, tensors):
        for name, tensor in tensors:
            first = int(name) if name.isdigit() else 0
            self.fused.data[first : first + len(tensor)].copy_(tensor)


def test_a_checkpoint_tensor_stays_whole_or_not_at_all():
    sent = specs_of({"0": torch.ones(1)})
    for frozen in ((), ("all",)):
        with pytest.raises(
            Unsupported, match=r"fused is not written .*: no part .* some of the elements that all fills"
        ):
            trace(Cut(), sent, on({"all": torch.zeros(4)}), may_stay=MayStay(frozen))


BOUNDS = ("layers.1.left.bound", "layers.1.right.bound")


@pytest.mark.parametrize(
    ("start", "frozen"), [(False, ("layers.1.*",)), (True, ("layers.1.w*", "layers.1.[lr]*.bound"))]
)
def test_a_repacked_module_stays_as_a_whole_as_it_was_repacked_or_not_at_all(start, frozen):
    """By the engine's names, or by those in its own checkpoint."""
    model, whole = started(Repacking(3, 8), weights(0, 3, 8)), weights(1, 3, 8)
    sent, stock = without(whole, "layers.1.weight", *BOUNDS), on(whole) if start else None
    with pytest.raises(Unsupported, match=r"layers\.1\."):
        trace(model, specs_of(sent), stock)
    program = trace(model, specs_of(sent), stock, may_stay=MayStay(frozen))
    assert program.kept == ("layers.1.bound", "layers.1.steps", "layers.1.weight")
    replay(program, sent)
    right = live_tensors(started(Repacking(3, 8), weights(0, 3, 8) | sent))
    assert [name for name, tensor in live_tensors(model).items() if not torch.equal(tensor, right[name])] == []
    for missing in (("layers.1.weight",), BOUNDS):
        with pytest.raises(Unsupported, match=r"layers\.1\.\w+ is not written by the loader at all"):
            trace(model, specs_of(without(whole, *missing)), stock, may_stay=MayStay(("*",)))


# -- patterns


def named(layer, expert, part):
    return f"model.layers.{layer}.experts.{expert}.w{part}.weight"


NAMES = [named(layer, expert, part) for layer in range(25) for expert in (0, 11) for part in (1, 2)] + [
    "0.x[1]",
    "head",
]


@given(st.sets(st.sampled_from(NAMES), min_size=1))
@settings(max_examples=examples(200), deadline=None)
def test_patterns_match_these_names_and_if_they_are_few_no_others(names):
    patterns = patterns_of(names, 12)
    matched = {name for name in NAMES if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    assert matched == names if not any("*" in pattern.replace("[*]", "") for pattern in patterns) else matched >= names
    assert len(patterns) <= 12


def test_patterns_are_short():
    layers = [f"model.layers.{n}.self_attn.k_proj.weight" for n in range(15, 35)]
    assert patterns_of(layers, 12) == [
        f"model.layers.{n}.self_attn.k_proj.weight" for n in ("1[56789]", "2[0123456789]", "3[01234]")
    ]
    assert patterns_of(layers, 2) == ["model.layers.*.self_attn.k_proj.weight"]
