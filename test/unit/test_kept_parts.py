"""Parts of fused parameters that an update leaves as they are: those of the checkpoint tensors that frozen= names."""

import fnmatch
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.engine.update import UpdateExecutor
from sglang_reshard.errors import EngineRefused, TornWeights, Unsupported
from sglang_reshard.trace.initial_values import keep_initial_values
from sglang_reshard.trace.kept import patterns_of
from sglang_reshard.trace.program import MayStay
from sglang_reshard.trace.stock_load import EngineStart
from sglang_reshard.trace.tracer import trace
from support.sweep import examples
from support.toy import ToyRank, checkpoint
from support.toy_repacking import Repacking, live_tensors, started, weights
from support.world import run_world
from tools.oracle.replay import replay
from toy_loader import specs_of

PARTS = ("k.weight", "v.weight")
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


def serve(rank, size, requests, *_, changes=(), fail_in=None):
    """Answers updates. Returns for each what is live. `changes`: of the requests, by their numbers from 0."""
    model = loaded(rank, size, checkpoint(0))
    target = TracedModel(model, start=on(checkpoint(0)))
    receiver = WeightReceiver(target, rank, size, torch.device("cpu"))
    found, monkey = [], pytest.MonkeyPatch()
    for number, request in enumerate(requests):
        if number == fail_in:
            monkey.setattr(UpdateExecutor, "_move", cut)
        requests.answer(receiver.update(replace(request, **dict(changes).get(number, {}))))
        monkey.undo()
        found.append(values(model))
    return found


def values(model):
    return {name: parameter.tolist() for name, parameter in model.named_parameters()}


def cut(*_):
    raise OSError("the wire was cut")


def train(trainer, calls, transport="p2p"):
    """Each of `calls` is what is left out of the next version, and the options."""
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30, transport=transport)

    def update(number, names, options):
        try:
            report = sender.update(without(checkpoint(number), *names), **options)
            return report.kept, report.digest
        except (EngineRefused, TornWeights) as error:
            return f"{type(error).__name__}: {error}"

    told = [update(number, *call) for number, call in enumerate(calls, start=1)]
    sender.close()
    return told


@pytest.mark.parametrize(
    ("transport", "staged", "engines"), [("ipc", False, 4), ("p2p", False, 2), ("p2p", True, 4), ("broadcast", True, 1)]
)
def test_what_is_sent_of_a_fused_parameter_is_updated_and_the_rest_stays(transport, staged, engines):
    """Four engine ranks replicate two heads of k and v."""
    options = {"verify": "full", "staged": staged}
    part = PARTS, {"frozen": ["[kv].weight"], **options}
    calls = [part, part, ((), options), (PARTS, {"frozen": ["*.weight"], **options})]
    told, found = run_world(2, engines, train, serve, calls, transport)
    assert [kept for kept, _ in told[0]] == [KEPT, KEPT, (), KEPT]
    digests = [digest for _, digest in told[0]]
    assert all(re.fullmatch("[0-9a-f]{16}", digest) for digest in digests)
    assert len(set(digests)) == 4
    for rank, live in enumerate(found):
        for number, brought_by in enumerate((0, 0, 3, 3)):
            parts = {name: checkpoint(brought_by)[name] for name in PARTS}
            assert live[number] == values(loaded(rank, engines, checkpoint(number + 1) | parts))


def train_for_a_digest(trainer):
    return train(trainer, [(PARTS, {"verify": "full", "frozen": ["[kv].weight"]})])


def test_the_digest_with_kept_parts_does_not_depend_on_the_sizes_of_either_side():
    one, _ = run_world(1, 1, train_for_a_digest, serve)
    other, _ = run_world(2, 4, train_for_a_digest, serve)
    assert one[0] == other[0] == other[1]


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


def test_a_part_stays_only_where_the_engine_s_own_checkpoint_shows_it():
    sent, model = specs_of(without(checkpoint(1), *PARTS)), loaded(0, 1, checkpoint(0))
    with pytest.raises(Unsupported, match="qkv is not written completely"):
        trace(model, sent, may_stay=MayStay(("*",)))
    with pytest.raises(Unsupported, match=r"frozen= names the tensors .* model_path; .*\(no folder\)"):
        trace(model, sent, lambda: EngineStart(None, "no folder"), may_stay=MayStay(("*",)))


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


# -- parts that nothing has brought


PART = (PARTS, {"frozen": PARTS})
WHOLE = ((), {})


def serve_from_dummy(rank, size, requests, *_):
    return serve(rank, size, requests, changes={n: DUMMY for n in range(4)})


def test_a_part_that_an_engine_never_had_is_refused():
    told, found = run_world(1, 2, train, serve_from_dummy, [PART, WHOLE, PART, PART])
    assert "qkv[k.weight], qkv[v.weight] would stay as they are, and nothing has brought them" in told[0][0]
    assert [kept for kept, _ in told[0][1:]] == [(), KEPT, KEPT]
    assert found[0][0] == values(loaded(0, 2, checkpoint(0)))


def serve_released(rank, size, requests, *_):
    lost, from_disk = DUMMY, {"stock_changes": 2, "stock_loaded": True}
    return serve(rank, size, requests, changes={2: lost, 3: from_disk})


def test_parts_that_were_released_have_to_be_brought_again():
    told, _ = run_world(1, 1, train, serve_released, [WHOLE, PART, PART, PART])
    assert [kept for kept, _ in told[0][:2]] == [(), KEPT]
    assert "qkv[k.weight], qkv[v.weight] would stay" in told[0][2]
    assert told[0][3][0] == KEPT


def serve_torn(rank, size, requests, *_):
    return serve(rank, size, requests, fail_in=1)


@pytest.mark.parametrize(
    ("torn", "then", "unsound"),
    [
        (WHOLE, PART, "qkv[k.weight], qkv[v.weight]"),
        (PART, (("q.weight", *PARTS), {"frozen": ["qkv"]}), "qkv"),
        (PART, PART, ""),
        ((("q.weight", *PARTS), {"frozen": ["qkv"]}), PART, ""),
    ],
)
def test_of_a_torn_update_only_what_it_did_not_write_may_stay(torn, then, unsound):
    told, _ = run_world(1, 2, train, serve_torn, [WHOLE, torn, then])
    assert told[0][1].startswith("TornWeights")
    assert f"engine rank 0: {unsound} would stay" in told[0][2] if unsound else told[0][2][0] == KEPT


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


def test_a_part_of_a_repacked_module_may_not_stay_and_all_of_it_may():
    model, whole = started(Repacking(3, 8), weights(0, 3, 8)), weights(1, 3, 8)
    sent = without(whole, "layers.1.weight", "layers.1.left.bound", "layers.1.right.bound")
    program = trace(model, specs_of(sent), on(whole), may_stay=MayStay(("layers.1.w*", "layers.1.[lr]*.bound")))
    assert program.kept == ("layers.1.bound", "layers.1.steps", "layers.1.weight")
    replay(program, sent)
    right = live_tensors(started(Repacking(3, 8), weights(0, 3, 8) | sent))
    assert [name for name, tensor in live_tensors(model).items() if not torch.equal(tensor, right[name])] == []
    with pytest.raises(Unsupported, match=r"layers\.1\.weight is not written by the loader at all"):
        trace(model, specs_of(without(whole, "layers.1.weight")), on(whole), may_stay=MayStay(("layers.1.*",)))


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
