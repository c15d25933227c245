"""Every trainer rank finds out what its own parameters hold, and states it."""

import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.sources import ShardBox
from sglang_reshard.verl.megatron import Megatron
from sglang_reshard.verl.traced_parameters import Conversion, TracedParameters
from support.megatron_bridge import training_engine
from support.moves import elsewhere
from support.partial_states import of_all_ranks


def parameters_of(*conversions, ranks=1):
    return TracedParameters(conversions, ranks)


def held_by(*ranks):
    """The shards of each tensor, given each rank's conversions."""
    given = [parameters_of(*conversions, ranks=len(ranks)).tensors() for conversions in ranks]
    layout = of_all_ranks(given)[0].layout
    return {tensor.name: layout.shard_map(tensor).shards for tensor in layout.tensors}


def rows(name, rank, size, of=2):
    """A parameter that is `rank`'s rows of a tensor of `size` columns on `of` ranks."""

    def convert(shard):
        return {name: torch.cat([shard if r == rank else elsewhere(shard) for r in range(of)])}

    return Conversion(f"megatron.{name}", torch.full((2, size), float(rank)), convert)


def whole(name, tensor):
    return Conversion(f"megatron.{name}", tensor, lambda shard: {name: shard})


def test_replicas_are_one_piece_unless_they_are_at_different_places():
    def second_half(shard):
        return {"t": shard.chunk(2)[1]}

    same = held_by(*([whole("t", torch.ones(2, 3))] for _ in range(3)))
    assert same["t"] == (ShardBox(Box((0, 0), (2, 3)), (0, 1, 2), (0, 0)),)
    moved = held_by([whole("t", torch.ones(2, 3))], [Conversion("fused", torch.ones(4, 3), second_half)])
    assert moved["t"] == (
        ShardBox(Box((0, 0), (2, 3)), (0,), (0, 0)),
        ShardBox(Box((0, 0), (2, 3)), (1,), (2, 0)),
    )


def tied(conversion):
    return conversion._replace(tied=True)


def test_of_two_tied_parameters_of_one_rank_the_first_is_read():
    def second_half(shard):
        return {"t": shard.chunk(2)[1]}

    first, second = torch.ones(2, 3), torch.ones(4, 3)
    parameters = parameters_of(tied(whole("t", first)), tied(Conversion("head", second, second_half)))
    ((_, tensor, held),) = parameters.tensors()
    assert tensor.data_ptr() == first.data_ptr()
    assert parameters.parameters == [first]
    assert held.shard_map.shards == (ShardBox(Box((0, 0), (2, 3)), (0,), (0, 0)),)


def test_later_only_the_parameters_memory_is_looked_up():
    """In a larger buffer, too, which it is a part of."""
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    asked = []

    def convert(shard):
        asked.append(shard)
        return {"rows": shard, "columns": shard.permute(1, 0)}

    parameters = parameters_of(Conversion("linear", parameter, convert))
    (_, _, first), (_, _, second) = parameters.tensors()
    times = len(asked)
    buffer = torch.arange(20.0)
    parameter.data = buffer[7:13].view(2, 3)
    (_, rows_, first_again), (_, columns, second_again) = parameters.tensors()
    assert torch.equal(rows_, buffer[7:13].view(2, 3))
    assert torch.equal(columns, buffer[7:13].view(2, 3).t())
    assert (first_again, second_again) == (first, second)
    assert first_again is first
    assert second_again is second
    assert len(asked) == times


def test_tensors_alike_but_for_their_names_share_what_is_said_of_them():
    experts = [whole(f"expert.{i}", torch.zeros(3, 3)) for i in range(5)]
    parameters = parameters_of(*experts)
    assert len({id(held) for _, _, held in parameters.tensors()}) == 1


def failing(shard):
    raise ValueError("it asked a process group for its members")


@pytest.mark.parametrize(
    ("conversions", "why"),
    [
        (
            [Conversion("norm", torch.ones(3), lambda shard: {"t": shard + 1})],
            "norm .*: the converter does arithmetic on t",
        ),
        ([Conversion("norm", torch.ones(3), failing)], "norm .*: ValueError: it asked"),
        (
            [Conversion("norm", torch.ones(3, 2).t(), lambda shard: {"t": shard})],
            "norm .*: it is a Tensor with strides",
        ),
        (
            [whole("t", torch.ones(3)), tied(whole("t", torch.ones(3)))],
            "another parameter, to which it is not tied",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(conversions, why):
    with pytest.raises(Unsupported, match=why):
        parameters_of(*conversions)


@pytest.mark.parametrize(
    ("ranks", "error", "why"),
    [
        (
            [[whole("t", torch.ones(3))], [whole("t", torch.ones(3, dtype=torch.bfloat16))]],
            Mismatch,
            r"t is float32 \(3,\) on trainer rank 0, but bfloat16 \(3,\) on trainer rank 1",
        ),
        (
            [[rows("t", 0, 3)], [whole("u", torch.ones(3))]],
            Unsupported,
            r"ranks \[0\] list it, and 6 of its 12",
        ),
        (
            [[tied(whole("t", torch.ones(4, 3)))], [tied(rows("t", 0, 3))], [tied(rows("t", 1, 3))]],
            Mismatch,
            "t: the trainer ranks that list it hold parts that do not go together",
        ),
    ],
)
def test_what_does_not_make_whole_tensors_is_refused(ranks, error, why):
    with pytest.raises(error, match=why):
        held_by(*ranks)


@pytest.fixture
def engine(monkeypatch):
    """As much of verl's Megatron engine as is read, with one parameter; converters communicate with no one."""
    probes = SimpleNamespace(make_probe=lambda mapping, module: mapping)
    monkeypatch.setitem(sys.modules, "verl.workers.engine.megatron.delta_export", probes)

    def task(name, parameter):
        mapping = SimpleNamespace(megatron_to_hf=lambda shard, module: {f"hf.{name}": shard}, hf_param=f"hf.{name}")
        return SimpleNamespace(
            global_param_name=name, mapping=mapping, param_weight=parameter, megatron_module=torch.nn.Module()
        )

    tasks = [
        task("embedding.word_embeddings.weight", torch.arange(16.0).view(8, 2)),
        None,
        task("layer", torch.arange(6.0).view(3, 2)),
        task("elsewhere", None),
    ]
    bridge = SimpleNamespace(get_conversion_tasks=lambda module: tasks)
    config = SimpleNamespace(vocab_size=5)
    made = training_engine([], SimpleNamespace(get_text_config=lambda: config), bridge)
    vars(made).update(tasks=tasks, task=task)
    return made


def test_what_the_architecture_does_after_conversion_is_followed(engine):
    def swapped(task, tensors, checkpoint):
        assert checkpoint == {"of": "the disk"}
        return {f"model.{name}": torch.cat([t[1:], t[:1]]) for name, t in tensors.items()}

    engine.bridge._model_bridge = SimpleNamespace(maybe_modify_converted_hf_weight=swapped)
    engine.bridge.hf_pretrained = SimpleNamespace(state={"of": "the disk"})
    given = {name: (tensor, held) for name, tensor, held in Megatron(1).tensors(engine)}
    tensor, held = given["model.hf.layer"]
    assert {piece.box.start: piece.local_start for piece in held.shard_map.shards} == {(0, 0): (1, 0), (2, 0): (0, 0)}
    assert tensor.data_ptr() == engine.tasks[2].param_weight.data_ptr()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"vanilla_bridge": True}, "vanilla_mbridge=False"),
        ({"peft_cls": object()}, "LoRA"),
    ],
)
def test_engines_without_probes_are_refused(engine, change, why):
    vars(engine).update(change)
    with pytest.raises(Unsupported, match=why):
        Megatron(1).tensors(engine)


def test_parameters_of_one_tensor_that_are_not_tied_are_refused_whichever_rank_has_the_other(engine):
    engine.tasks[3].mapping.hf_param = "hf.layer"
    with pytest.raises(Unsupported, match=r"layer and elsewhere, which are not tied, are both converted to hf.layer"):
        Megatron(2).tensors(engine)
    engine.tasks[2].param_weight.shared_embedding = True
    assert [name for name, *_ in Megatron(2).tensors(engine)] == ["hf.embedding.word_embeddings.weight", "hf.layer"]


class Stacks:
    """A bridge of an architecture that keeps experts, [in, out], until it has all, and then stacks them, transposed."""

    def __init__(self, experts, ep_size):
        self.experts, self.ep_size, self.kept = experts, ep_size, {}

    def maybe_modify_converted_hf_weight(self, task, tensors, checkpoint):
        number = getattr(task, "local_number", None)
        if number is None:
            return tensors
        ((name, tensor),) = tensors.items()
        for rank, expert in enumerate(tensor if self.ep_size > 1 else [tensor]):
            self.kept[number + rank * self.experts // self.ep_size] = expert.t()
        if len(self.kept) < self.experts:
            return {}
        return {name: torch.stack([self.kept.pop(i) for i in range(self.experts)])}


class ExpertMapping:
    """Has no communication, as verl's probe of a mapping."""

    is_expert, hf_param, ep_size = True, "experts.down", 2

    def __init__(self, ep_rank):
        self.ep_rank = ep_rank

    def gather_from_ep_ranks(self, shard, module, name):
        raise AssertionError("a probe must not gather")

    def megatron_to_hf(self, shard, module):
        module.converted = getattr(module, "converted", 0) + 1
        return self.gather_from_ep_ranks(shard, module, self.hf_param)


def expert_engine(engine, ep_rank, parameters):
    """The engine with two experts on each of two expert parallel ranks."""
    tasks = [
        SimpleNamespace(
            global_param_name=f"experts.fc2.weight{2 * ep_rank + i}", mapping=ExpertMapping(ep_rank),
            param_weight=parameter, megatron_module=torch.nn.Module(), local_number=i,
        )
        for i, parameter in enumerate(parameters)
    ]  # fmt: skip
    bridge = SimpleNamespace(
        get_conversion_tasks=lambda module: tasks,
        _model_bridge=Stacks(4, 2),
        hf_pretrained=SimpleNamespace(state={}, config=None),
    )
    return SimpleNamespace(**{**vars(engine), "tasks": tasks, "bridge": bridge})


def in_one_buffer(values):
    """Parameters in one buffer, the last one first, as Megatron's optimizer has them."""
    return list(values.flip(0))[::-1]


def apart(values):
    return [value.clone() for value in values]


@pytest.mark.parametrize("place", [in_one_buffer, apart])
def test_experts_that_the_checkpoint_stacks_are_joined(engine, place):
    """In place if they are in one buffer, and else as a copy in the same memory, which follows the parameters."""
    experts = torch.arange(24.0).view(4, 2, 3)
    engines = [expert_engine(engine, rank, place(experts[2 * rank : 2 * rank + 2])) for rank in range(2)]
    sources = [Megatron(2) for _ in engines]
    given = [source.tensors(one) for source, one in zip(sources, engines, strict=True)]
    layout = of_all_ranks(given)[0].layout
    assert [(tensor.name, tensor.shape) for tensor in layout.tensors] == [("experts.down", (4, 3, 2))]
    shards = layout.shard_map(layout.tensors[0])
    for rank, (source, one) in enumerate(zip(sources, engines, strict=True)):
        ((_, tensor, _),) = given[rank]
        for factor in (1, 3):
            for task, value in zip(one.tasks, experts[2 * rank :], strict=False):
                task.param_weight.copy_(value * factor)
            ((_, again, _),) = source.tensors(one)
            for piece in shards.shards_of(rank):
                inside = tuple(slice(a, a + n) for a, n in zip(piece.local_start, piece.box.shape, strict=True))
                assert torch.equal(again[inside], experts.transpose(1, 2)[piece.box.slices()] * factor)
            assert again.data_ptr() == tensor.data_ptr()
        own = {task.param_weight.untyped_storage().data_ptr() for task in one.tasks}
        assert (tensor.untyped_storage().data_ptr() in own) == (place is in_one_buffer)
        assert sum(piece.box.numel for piece in shards.shards_of(rank)) == 12
        # One conversion for each expert, and one of placeholders for all.
        assert sum(task.megatron_module.converted for task in one.tasks) == 2 + 1


def test_what_is_computed_of_a_whole_parameter_is_sent_as_a_copy():
    """As of norms that a trainer stores less one."""
    weight = torch.arange(3.0)
    parameters = parameters_of(Conversion("norm", weight, lambda shard: {"t": shard + 1}, whole=True))
    ((_, first, held),) = parameters.tensors()
    assert torch.equal(first, torch.tensor([1.0, 2, 3]))
    assert held.shard_map.shards == (ShardBox(Box((0,), (3,)), (0,), (0,)),)
    weight.mul_(10)
    ((_, second, _),) = parameters.tensors()
    assert torch.equal(second, torch.tensor([1.0, 11, 21]))
    assert second.data_ptr() == first.data_ptr()
    assert parameters.parameters == [weight]


def test_what_is_computed_with_elements_of_other_ranks_is_refused():
    def convert(shard):
        return {"t": torch.cat([shard, torch.full_like(shard, float("nan"))]) + 1}

    with pytest.raises(Unsupported, match=r"norm .* with elements of other trainer ranks"):
        parameters_of(Conversion("norm", torch.ones(3), convert, whole=True))


def test_parameters_that_the_architecture_collects_are_refused(engine):
    collects = SimpleNamespace(maybe_modify_converted_hf_weight=lambda task, tensors, checkpoint: {})
    engine.bridge._model_bridge, engine.bridge.hf_pretrained = collects, SimpleNamespace(state={}, config=None)
    with pytest.raises(Unsupported, match=r"embedding.* fuses it with other parameters into one checkpoint tensor"):
        Megatron(1).tensors(engine)
