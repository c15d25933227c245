"""Names with wrappers' prefixes, and of a text trainer: the engine's loader decides which it reads."""

import pytest
import torch

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.loader_names import LoaderNames, Reading, find_names, reading
from sglang_reshard.engine.name_candidates import unwrapped
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.errors import EngineRefused, Mismatch
from sglang_reshard.trace.names_read import NamesRead
from support.toy import ToyRank, checkpoint
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
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    exact = []
    for version, request in enumerate(requests, start=1):
        requests.answer(receiver.update(request))
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
                "ddp": f"module.{name}",
                "compiled": f"_orig_mod.{name}",
                "both": f"module._orig_mod.{name}",
                "fsdp": f"_fsdp_wrapped_module.{module}._checkpoint_wrapped_module.{leaf}",
                "peft": f"base_model.model.{module}.base_layer.{leaf}",
                "some": name if number % 2 else f"_orig_mod.{name}",
                "given": name,
            }[how]
        ] = tensor
    return found


def train(trainer, _, how, verify):
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30)
    state = wrapped(1, how)
    first = sender.update(state, verify=verify)
    for name, tensor in wrapped(2, how).items():
        state[name].copy_(tensor)
    second = sender.update(state, verify=verify)
    sender.close()
    return first.message, first.digest, second.digest, "trace" in second.seconds


WRAPPERS = ["ddp", "compiled", "both", "fsdp", "peft", "some"]


@pytest.mark.parametrize("kind", ["raises", "skips", "stages"])
def test_wrappers_are_taken_off_where_the_loader_reads_what_is_left(kind):
    digests = set()
    for how in [*WRAPPERS, "given"] if kind == "skips" else ["both", "peft"]:
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


def train_text(trainer, _, tower):
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30)
    state = {f"module.model.{name}": tensor for name, tensor in checkpoint(1).items()}
    state[tower] = torch.ones(4)
    report = sender.update(state, verify="full")
    sender.close()
    return report.message


@pytest.mark.parametrize("tower", ["visual.module.weight", "module.visual.module.weight"])
def test_the_language_model_of_a_larger_engine_is_found_and_a_module_named_module_kept(tower):
    told, exact = run_world(1, 2, train_text, serve, "nested", tower)
    assert exact == [[True]] * 2
    assert "module.model.embed.weight is read as model.language_model.embed.weight" in told[0]
    assert "visual.module.weight is read as visual.weight" not in told[0]


def train_refused(trainer, _, extra, options):
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30)
    try:
        return sender.update(checkpoint(1) | {name: torch.ones(48, 16) for name in extra}, **options).message
    except EngineRefused as error:
        return str(error)
    finally:
        sender.close()


@pytest.mark.parametrize("kind", ["raises", "skips"])
def test_two_tensors_that_would_share_a_name_are_refused_by_both_names(kind):
    told, _ = run_world(1, 2, train_refused, serve, kind, ["module.q.weight"], {})
    assert "q.weight and module.q.weight are both q.weight without the prefixes of wrappers" in told[0]
    told, _ = run_world(1, 1, train_refused, serve, kind, ["_orig_mod.x.weight", "module.x.weight"], {})
    assert ("does not read" in told[0]) == (kind == "skips")


def test_names_that_are_ignored_keep_their_wrappers():
    ignored = {"ignore": ["module.rotary.*"]}
    told, exact = run_world(1, 2, train_refused, serve, "skips", ["module.rotary.weight"], ignored)
    assert told == ["the engine does not read module.rotary.weight"]
    assert exact == [[True]] * 2


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("model.layers.0.weight", []),
        ("module.model.layers.0.weight", ["model.layers.0.weight"]),
        ("module.module.w", ["w"]),
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


def test_names_that_nothing_helps_stay_as_they_were_given():
    found = find_names("l", ["module.a", "module.unknown"], (), Loader(["a"]))
    assert found.names == ("a", "module.unknown")
    assert Reading(b"\x80").refused == -1


def test_a_state_whose_names_are_all_there_twice_is_told_apart_at_once():
    names = [f"{n}.w" for n in range(20_000)]
    found = find_names("l", [*names, *(f"module.{name}" for name in names)], (), Loader(names))
    assert found.names == ()
    assert "0.w and module.0.w are both 0.w without" in found.hint
