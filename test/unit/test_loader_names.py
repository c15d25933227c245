"""Names with wrappers' prefixes, and of a text trainer: the engine's loader decides which it reads."""

import ast
import re

import numpy as np
import pytest
import torch

from sglang_reshard.engine.names import Reading, find_names, reading, unwrapped
from sglang_reshard.engine.targets import LoaderNames
from sglang_reshard.errors import EngineRefused, Mismatch
from sglang_reshard.layout.names import Renaming, is_held_back
from sglang_reshard.trace.loader import NamesRead
from support.toy import ToyRank, checkpoint
from support.toy_serving import answered, receiver_of
from support.world import run_world


class Skipping(ToyRank):
    """Skips names that it does not know, as many of SGLang's loaders do; `ToyRank` raises."""

    def load_weights(self, weights):
        known = checkpoint(0)
        super().load_weights((name, tensor) for name, tensor in weights if name in known)


class Nested(ToyRank):
    """An engine whose language model is part of a larger one, with a checkpoint that has a module named `module`."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.tower = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights):
        rest = []
        for name, tensor in weights:
            if name == "visual.module.weight":
                self.tower.data.copy_(tensor)
            elif name.startswith("model.language_model."):
                rest.append((name.removeprefix("model.language_model."), tensor))
        super().load_weights(rest)


class Stage(Skipping):
    """A pipeline stage: each of two engine ranks has only some of the parameters."""

    def __init__(self, rank, size):
        super().__init__(0, 1)
        self.mine = ["embed.weight", "q.weight", "k.weight", "v.weight"] if rank == 0 else None
        for name in ("down", "gate_up", "norm") if rank == 0 else ("embed", "qkv"):
            delattr(self, name)

    def load_weights(self, weights):
        first = ("embed.weight", "q.weight", "k.weight", "v.weight")
        super().load_weights((n, t) for n, t in weights if (n in first) == (self.mine is not None))


KINDS = {"raises": ToyRank, "skips": Skipping, "nested": Nested, "stages": Stage}


def serve(rank, size, requests, kind, *_):
    """Answers updates; returns for each whether the weights are those of versions 1, 2, 3 in turn."""
    model = KINDS[kind](rank, size)
    receiver, exact = receiver_of(model, rank, size), []
    for version, _request in enumerate(answered(receiver, requests), start=1):
        stock = KINDS[kind](rank, size)
        prefix = "model.language_model." if kind == "nested" else ""
        named = {f"{prefix}{n}": t for n, t in checkpoint(version).items()}
        if kind == "nested":
            named["visual.module.weight"] = torch.full((4,), float(version))
        stock.load_weights(named.items())
        exact.append(all(torch.equal(p, getattr(model, n)) for n, p in stock.named_parameters()))
    assert not receiver.torn
    return exact


def wrapped(version, how):
    """Weights under the names that wrappers give them."""
    found = {}
    for number, (name, tensor) in enumerate(checkpoint(version).items()):
        module, _, leaf = name.rpartition(".")
        found[
            {
                "both": f"module._orig_mod.{name}",
                "peft": f"base_model.model.{module}.base_layer.{leaf}",
                "some": name if number % 2 else f"_orig_mod.{name}",
                "given": name,
            }[how]
        ] = tensor
    return found


def train(trainer, _, how, verify):
    sender = trainer.sender()
    state = wrapped(1, how)
    first = sender.update(state, verify=verify)
    for name, tensor in wrapped(2, how).items():
        state[name].copy_(tensor)
    second = sender.update(state, verify=verify)
    return first.message, first.digest, second.digest, "trace" in second.seconds


@pytest.mark.parametrize("kind", ["raises", "skips", "stages"])
def test_wrappers_are_taken_off_where_the_loader_reads_what_is_left(kind):
    digests = set()
    for how in ["both", "peft", "some", "given"] if kind == "skips" else ["both", "peft"]:
        told, exact = run_world(2, 2, train, serve, kind, how, "full")
        assert told[0] == told[1]
        message, *found, traced_again = told[0]
        digests.add(tuple(found))
        assert exact == [[True, True]] * 2, how
        assert not traced_again
        assert bool(message) == (how != "given")
        if how == "both":
            assert "module._orig_mod.embed.weight is read as embed.weight" in message
    assert len(digests) == 1  # it is of what the engine reads, whatever the trainer calls it
    assert all(digests.pop())


def train_once(trainer, _, state, options):
    """What the report of an update says, or its refusal."""
    try:
        return trainer.sender().update(state, **options).message
    except EngineRefused as error:
        return str(error)


@pytest.mark.parametrize("tower", ["visual.module.weight", "module.visual.module.weight"])
def test_the_language_model_of_a_larger_engine_is_found_and_a_module_named_module_kept(tower):
    state = {f"module.model.{name}": tensor for name, tensor in checkpoint(1).items()} | {tower: torch.ones(4)}
    told, exact = run_world(1, 2, train_once, serve, "nested", state, {"verify": "full"})
    assert exact == [[True]] * 2
    assert "module.model.embed.weight is read as model.language_model.embed.weight" in told[0]
    assert "visual.module.weight is read as visual.weight" not in told[0]


@pytest.mark.parametrize("kind", ["raises", "skips"])
def test_two_tensors_that_would_share_a_name_are_refused_by_both_names(kind):
    double = checkpoint(1) | {"module.q.weight": torch.ones(48, 16)}
    told, _ = run_world(1, 2, train_once, serve, kind, double, {})
    assert "q.weight and module.q.weight are both q.weight without the prefixes of wrappers" in told[0]
    double = checkpoint(1) | dict.fromkeys(("_orig_mod.x.weight", "module.x.weight"), torch.ones(48, 16))
    told, _ = run_world(1, 1, train_once, serve, kind, double, {})
    assert ("does not read" in told[0]) == (kind == "skips")


@pytest.mark.parametrize("kind", ["raises", "skips"])
def test_a_whole_peft_model_is_refused_with_what_to_send(kind):
    whole = wrapped(1, "peft") | {f"base_model.model.q.lora_{ab}.default.weight": torch.ones(2, 2) for ab in "AB"}
    told, _ = run_world(1, 2, train_once, serve, kind, whole, {})
    for cure in ("sender.lora_adapter(", "adapter_tensors(model)", "merge_adapter()", "base_tensors(", "ignore="):
        assert cure in told[0]
    told, exact = run_world(1, 2, train_once, serve, kind, whole, {"ignore": "*lora_*"})
    assert "ignored: base_model.model.q.lora_A.default.weight, base_model.model.q.lora_B" in told[0]
    assert exact == [[True]] * 2


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("model.layers.0.weight", []),
        ("module.model.layers.0.weight", ["model.layers.0.weight"]),
        ("module.module.w", ["w"]),
        ("_orig_mod.w", ["w"]),
        ("_fsdp_wrapped_module.model._checkpoint_wrapped_module.w", ["model.w"]),
        ("module.enc.module.w", ["enc.module.w", "enc.w"]),
        ("enc.module.w", ["enc.w"]),
        ("base_model.model.model.layers.0.q_proj.base_layer.weight", ["model.layers.0.q_proj.weight"]),
        ("model.base_model.model.w", []),
        ("my_module.w", []),
        ("a._orig_mod.module", ["a.module"]),
        ("module", []),
        ("draft.module.w", ["draft.w"]),
    ],
)
def test_what_a_name_may_be_without_its_wrappers(name, candidates):
    assert unwrapped(name) == candidates


class Loader:
    """Reads `known` names, and raises at others if it is strict. Counts how often it was run."""

    def __init__(self, known, strict=False):
        self.known, self.strict, self.runs = set(known), strict, 0

    def __call__(self, names):
        self.runs += 1
        read = []
        for name in names:
            if name not in self.known and self.strict:
                return [reading(NamesRead(frozenset(read), name), list(names))]
            read += [name] if name in self.known else []
        return [reading(NamesRead(frozenset(read), ""), list(names))]


def test_what_is_read_as_given_stays_so_and_costs_one_run():
    loader = Loader(["enc.module.w", "enc.w"])
    assert find_names("l", ["enc.module.w", "enc.w"], (), loader).names == ()
    assert loader.runs == 1


@pytest.mark.parametrize("strict", [False, True])
def test_each_name_is_decided_by_itself(strict):
    loader = Loader(["enc.module.w", "enc.w", "dec.w"], strict)
    given = ["module.enc.module.w", "module.enc.w", "_orig_mod.dec.module.w"]
    found = find_names("l", given, (), loader)
    assert found.names == ("enc.module.w", "enc.w", "dec.w")
    assert found.trainer_names(["dec.w", "enc.w"]) == (given[2], given[1])
    assert LoaderNames().trainer_names(["a"]) == ("a",)
    assert find_names("l", given, (), loader).digest == found.digest != ""


def test_all_engine_ranks_together_read_a_name():
    def probe(names):
        halves = names[:2], names[2:]
        return [reading(NamesRead(frozenset(half) & {"a", "b", "c"}, ""), list(names)) for half in halves]

    assert find_names("l", ["module.a", "module.b", "module.c"], (), probe).names == ("a", "b", "c")


def test_an_ambiguous_place_of_the_language_model_is_refused_with_the_ways():
    loader = Loader(["model.language_model.w", "language_model.model.w"])
    with pytest.raises(Mismatch, match=r"rename=\{'model\.': 'model\.language_model\.'\} or rename="):
        find_names("l", ["model.w"], (), loader)


def test_a_mapping_that_helps_in_part_is_said():
    found = find_names("l", ["model.w", "model.v", "x"], (), Loader(["model.language_model.w"]))
    assert found.names == ()
    assert "With rename={'model.': 'model.language_model.'} the engine would read 1 more" in found.hint


VISION = [f"blocks.{n}.weight" for n in range(2)]
TEXT = ["embed_tokens.weight", "layers.0.weight", "norm.weight"]


def named(text, head, *others):
    """Names of a model, by the prefixes of its parts; the first of `others` is that of its vision tower."""
    vision, *rest = others
    return [*(vision + n for n in VISION), *(text + n for n in TEXT), *rest, *([head + "weight"] if head else [])]


TRANSFORMERS = "model.language_model.", "lm_head.", "model.visual."
TOWER = "model.language_model.", "lm_head.", "model.vision_tower.", "model.multi_modal_projector.weight"
INNER = "vision_tower.vision_model."
# What trainers send, and the names that SGLang's loaders read of it.
PLACES = {
    "Qwen2.5-VL": (TRANSFORMERS, ("model.", "lm_head.", "visual.")),
    "Llava": (
        TOWER,
        ("language_model.model.", "language_model.lm_head.", "vision_tower.", "multi_modal_projector.weight"),
    ),
    "Gemma-3": (TOWER, ("language_model.model.", "language_model.lm_head.", INNER, "multi_modal_projector.weight")),
    "Lfm2-VL": (TOWER, (TOWER[0], TOWER[1], f"model.{INNER}", TOWER[3])),
    "PaddleOCR-VL": ((*TRANSFORMERS, "model.projector.w"), ("model.", "lm_head.", "visual.", "mlp_AR.w")),
    "thinker": (
        ("model.", "lm_head.", "visual.", "audio_tower.w"),
        ("thinker.model.", "thinker.lm_head.", "thinker.visual.", "thinker.audio_tower.w"),
    ),
    "text": (("model.", "lm_head.", ""), ("language_model.model.", "language_model.lm_head.", "")),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("model", PLACES)
def test_the_parts_of_a_model_are_found_where_its_loader_has_them(model, strict):
    sent, read = (named(*prefixes) for prefixes in PLACES[model])
    loader = Loader(read, strict)
    for given in (sent, [f"module.{name}" for name in sent]):
        loader.runs = 0
        found = find_names("l", given, (), loader)
        assert found.names == tuple(read)
        assert loader.runs <= 32


@pytest.mark.parametrize("strict", [False, True])
def test_a_part_that_could_be_at_two_places_is_refused_with_both(strict):
    sent = named(*TRANSFORMERS)
    loader = Loader(named("model.", "lm_head.", "visual.") + named("model.", "", "vision_model."), strict)
    with pytest.raises(Mismatch, match=r"model\.visual\.blocks\.0\.weight matches several tensors") as refused:
        find_names("l", sent, (), loader)
    for place in ("visual.", "vision_model."):
        way = {"model.visual.": place, "model.language_model.": "model."}
        assert f"rename={way}" in str(refused.value)
        renamed = [Renaming.of(way)(name) for name in sent]
        assert find_names("l", renamed, (), loader) == LoaderNames("l")


def test_no_part_is_put_where_another_is():
    loader = Loader([*named("model.", "lm_head.", "visual."), "x"])
    sent = [*named(*TRANSFORMERS), *("vision_tower." + name for name in VISION)]
    found = find_names("l", sent, (), loader)
    assert found.names == ()
    assert len(set(Renaming.of({"model.visual.": "visual."})(n) for n in sent)) == len(sent)


@pytest.mark.parametrize("wrapper", ["", "module.", "base_model.model."])
def test_the_rename_that_helps_in_part_does_as_it_says(wrapper):
    sent = [wrapper + name for name in (*named(*TRANSFORMERS), "model.resampler.x")]
    loader = Loader(named("model.", "lm_head.", "visual."))
    said = find_names("l", sent, (), loader).hint
    way, more = re.match(r"With rename=(\{.*\}) the engine would read (\d+) more of", said).groups()
    renamed = [Renaming.of(ast.literal_eval(way))(name) for name in sent]
    assert int(more) == len(VISION) + len(TEXT)
    assert len(loader.known.intersection(renamed) - {"lm_head.weight"}) == int(more)


@pytest.mark.parametrize("strict", [False, True])
def test_a_loader_does_not_get_what_it_need_not_read_and_raises_at(strict):
    given = ["head", "a", "x.lora_A", "x.lora_B"]
    seen = []
    loader = Loader(["a"], strict)

    def probe(names):
        kept = [name for name in names if not is_held_back(name)]
        seen.append(kept)
        (answer,) = loader(kept)
        read = dict(zip(kept, np.unpackbits(np.frombuffer(answer.read, np.uint8), count=len(kept)), strict=True))
        refused = kept[answer.refused] if answer.refused >= 0 else ""
        return [reading(NamesRead(frozenset(n for n, bit in read.items() if bit), refused), names)]

    found = find_names("l", given, ("head", "*.lora_*"), probe)
    assert seen[-1] == (["a"] if strict else given)
    assert found.trainer_names([name for name in found.names if name != "a"]) == (
        ("head", "x.lora_A", "x.lora_B") if strict else ()
    )
    assert found.remark == ""


def test_names_that_nothing_helps_stay_as_they_were_given():
    found = find_names("l", ["module.a", "module.unknown"], (), Loader(["a"]))
    assert found.names == ("a", "module.unknown")
    assert Reading(b"\x80").refused == -1


def test_a_state_whose_names_are_all_there_twice_is_told_apart_at_once():
    names = [f"{n}.w" for n in range(20_000)]
    found = find_names("l", [*names, *(f"module.{name}" for name in names)], (), Loader(names))
    assert found.names == ()
    assert "0.w and module.0.w are both 0.w without" in found.hint
