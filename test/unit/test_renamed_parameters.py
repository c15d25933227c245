"""Names and sets as trainers have them: dicts, renamings, and a listing that fails on one rank."""

from collections import OrderedDict

import pytest
import torch

from sglang_reshard.errors import Mismatch, ReshardError
from sglang_reshard.extras.modules.receiver import StateDictModel
from sglang_reshard.extras.realloc import reshard
from sglang_reshard.extras.snapshots.of_sender import Snapshots
from sglang_reshard.layout.names import Renaming, patterns
from sglang_reshard.sources import FlatBuffer, FlatMember, FusedSlice, FusedTensor, describe
from support.refusals import refusal_of
from support.several_engines import several_engines_sender
from support.toy import ToyRank, checkpoint
from support.toy_serving import answered, receiver_of, serve
from support.world import run_world


def train_with_dicts(trainer, kind):
    sender = trainer.sender()
    first = kind(checkpoint(1))
    sender.update(first)
    for name, tensor in checkpoint(2).items():
        first[name].copy_(tensor)
    warm = sender.update(first)
    sender.update_async(kind(checkpoint(3))).wait()
    return "trace" not in warm.seconds


def nested(weights):
    """A TensorDict as `TensorDict.from_module` makes them: one in another for each module."""
    from tensordict import TensorDict

    tree = {}
    for name, tensor in weights.items():
        module, leaf = name.split(".")
        tree.setdefault(module, {})[leaf] = tensor
    return Nested(TensorDict(tree))


class Nested:
    """Gives tensors of a TensorDict by their full names, for the test alone."""

    def __init__(self, tree):
        self.tree = tree

    def __getitem__(self, name):
        return self.tree[tuple(name.split("."))]

    def flatten_keys(self, separator):
        return self.tree.flatten_keys(separator)


@pytest.mark.parametrize("kind", [dict, OrderedDict, nested])
def test_a_dict_is_taken_as_its_items(kind):
    if kind is nested:
        pytest.importorskip("tensordict")
    warm, found = run_world(2, 2, train_with_dicts, serve, kind)
    assert warm == [True, True]
    assert found == [[1, 2, 3]] * 2


def snapshot_of_a_dict(trainer, folder):
    sender = trainer.sender()
    weights = {f"policy.{name}": tensor for name, tensor in checkpoint(1).items()}
    snapshots = Snapshots(sender, folder, rename={"policy.": ""})
    snapshots.write(weights, "1")
    snapshots.write_async(weights, "2").wait()


def test_a_snapshot_takes_a_dict_and_a_renaming(tmp_path):
    from safetensors.torch import load_file

    run_world(2, 1, snapshot_of_a_dict, serve, str(tmp_path))
    for name in ("1", "2"):
        found = {}
        for file in (tmp_path / name).glob("*.safetensors"):
            found |= load_file(file)
        expected = checkpoint(1)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[n], expected[n]) for n in expected)


def reshard_dicts(trainer):
    source, target = checkpoint(1), checkpoint(2)
    reshard(OrderedDict(source), target)
    return all(torch.equal(target[name], source[name]) for name in source)


def test_reshard_takes_dicts_on_both_sides():
    copied, _ = run_world(2, 1, reshard_dicts, serve)
    assert copied == [True, True]


def drop_policy(name):
    return name.removeprefix("policy.")


def train_renamed(trainer, rename, asynchronous):
    sender = trainer.sender()
    state = {f"policy.{name}": tensor for name, tensor in checkpoint(0).items()}
    seconds = []

    def update(renaming):
        if asynchronous:
            return sender.update_async(state, rename=renaming).wait()
        return sender.update(state, rename=renaming)

    for version in (1, 2):
        for name, tensor in checkpoint(version).items():
            state[f"policy.{name}"].copy_(tensor)
        seconds.append(set(update(rename).seconds))
    # Another renaming of the same memory is not taken for the last one.
    with pytest.raises(ReshardError) as refused:
        update({"policy.": "actor."})
    return "trace" in seconds[1], str(refused.value)


@pytest.mark.parametrize(("rename", "asynchronous"), [({"policy.": "", "policy.e": "e"}, False), (drop_policy, True)])
def test_names_are_those_that_rename_gives_them(rename, asynchronous):
    told, found = run_world(2, 2, train_renamed, serve, rename, asynchronous)
    assert [entry[0] for entry in told] == [False, False]
    assert all("actor.embed.weight" in entry[1] for entry in told), told
    assert found == [[1, 2, 2]] * 2


def test_the_longest_prefix_is_replaced_once():
    renaming = Renaming.of({"a.": "x.", "a.b.": "a.", "": "all."})
    assert [renaming(name) for name in ("a.b.c", "a.c", "c")] == ["a.c", "x.c", "all.c"]


def describe_renamed(rename, **tensors):
    return describe(tensors, trainer_rank=3, global_ranks=(0, 1, 2, 3), rename=Renaming.of(rename))


def test_two_names_that_become_one_are_both_named():
    with pytest.raises(Mismatch, match="trainer rank 3: a and b are both sent as w"):
        describe_renamed(lambda name: "w", a=torch.ones(2), b=torch.ones(2))
    with pytest.raises(Mismatch, match="rename returned None for a"):
        describe_renamed(lambda name: None, a=torch.ones(2))
    with pytest.raises(Mismatch, match="rename is a list"):
        Renaming.of(["a"])


def test_the_tensors_within_a_fused_one_and_a_flat_buffer_are_renamed():
    fused = FusedTensor(
        (("policy.a", FusedSlice((0, 0), (2, 4), (0, 1))), ("policy.b", FusedSlice((2, 0), (4, 4), (0, 1))))
    )
    flat = FlatBuffer((FlatMember("policy.c", (2, 3), 0),), ((0, 0, 6),))
    given = [("stack", torch.ones(4, 4), fused), ("flat", torch.ones(6), flat)]
    state = describe(given, trainer_rank=0, global_ranks=(0,), rename=Renaming.of({"policy.": ""}))
    assert [tensor.name for tensor in state.layout.tensors] == ["a", "b", "c"]


def test_a_string_is_one_pattern():
    assert patterns("lm_head.*") == ("lm_head.*",)
    assert patterns(["a", "b"]) == ("a", "b")


# -- a listing that fails on one rank


def train_with_a_failing_generator(trainer, how):
    sender = trainer.sender()

    def weights():
        for number, (name, tensor) in enumerate(checkpoint(1).items()):
            if trainer.rank == 1 and number == 3:
                raise RuntimeError("the converter is out of memory")
            yield name, tensor

    attempts = {
        "update": lambda: sender.update(weights()),
        "partial": lambda: sender.update(weights(), partial=True),
        "update_async": lambda: sender.update_async(weights()).wait(),
        "fallback": lambda: Snapshots(sender, "nowhere").update_or_write(weights(), weight_version="1"),
        "snapshot": lambda: Snapshots(sender, "nowhere").write(weights(), "1"),
        "reshard": lambda: reshard(weights(), checkpoint(2)),
    }
    return refusal_of(attempts[how])[1]


@pytest.mark.parametrize("how", ["update", "partial", "update_async", "fallback", "snapshot", "reshard"])
def test_a_generator_that_raises_on_one_rank_is_named_by_that_rank_on_all(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told, _ = run_world(2, 1, train_with_a_failing_generator, serve, how)
    assert all("trainer rank 1: " in message for message in told), told
    assert all("RuntimeError" in message and "the converter is out of memory" in message for message in told), told


# -- several receivers


def train_for_many(trainer):
    sender, _host = several_engines_sender(trainer, timeout_s=30, transport="p2p")
    sender.set_engines({"engine": trainer.send_one[0], "module": trainer.send_one[1]})
    named = {f"_orig_mod.policy.{name}": tensor for name, tensor in checkpoint(1).items()}
    options = {"rename": {"_orig_mod.policy.": "module."}, "verify": "full"}
    whole = sender.update(named, **options)
    part = {name: tensor + 1 for name, tensor in named.items() if "down" not in name}
    kept = sender.update(part, frozen="down*", **options)
    later = sender.update_async(part, only=["e*", "q*", "k*", "v*", "g*", "u*", "n*"], **options).wait()
    sender.close()
    return [
        {name: (report.kept, report.digest) for name, report in reports.items()} for reports in (whole, kept, later)
    ]


class Plain(torch.nn.Module):
    """A module with the checkpoint's names, as a `ModuleReceiver` takes it."""

    def __init__(self):
        super().__init__()
        for name, tensor in checkpoint(0).items():
            part = torch.nn.Module()
            part.weight = torch.nn.Parameter(tensor)
            self.add_module(name.removesuffix(".weight"), part)


def serve_each(rank, _size, requests):
    """Engine rank 0 is an engine, engine rank 1 a plain module; both have version 1 first, and then all but `down`."""
    model = ToyRank(0, 1) if rank == 0 else StateDictModel(Plain(), strict=False)
    model.load_weights(checkpoint(0).items())
    for number, _ in enumerate(answered(receiver_of(model, 0, 1), requests)):
        stock = ToyRank(0, 1) if rank == 0 else StateDictModel(Plain(), strict=False)
        stock.load_weights((n, t + (number > 0 and "down" not in n)) for n, t in checkpoint(1).items())
        live = dict(model.named_parameters())
        assert all(torch.equal(live[name], p) for name, p in stock.named_parameters())
    return True


def test_an_engine_and_a_module_take_the_same_options_and_name_what_they_keep_alike():
    told, _ = run_world(2, 2, train_for_many, serve_each)
    assert told[0] == told[1]
    whole, kept, later = told[0]
    assert whole["engine"] == whole["module"]
    assert [kept[name][0] for name in ("engine", "module")] == [("down",), ("down.weight",)]
    assert kept == later
    assert kept["engine"][1] != whole["engine"][1]
