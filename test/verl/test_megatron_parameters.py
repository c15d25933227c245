"""What a trainer rank of verl's Megatron engine finds out of its parameters, and which engines are refused."""

import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.verl.megatron import Megatron
from support.megatron_bridge import training_engine
from support.partial_states import of_all_ranks


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
    given = {name: (tensor, held) for name, tensor, held in Megatron(0, 1).tensors(engine)}
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
        Megatron(0, 1).tensors(engine)


def test_parameters_of_one_tensor_that_are_not_tied_are_refused_whichever_rank_has_the_other(engine):
    engine.tasks[3].mapping.hf_param = "hf.layer"
    with pytest.raises(Unsupported, match=r"layer and elsewhere, which are not tied, are both converted to hf.layer"):
        Megatron(0, 2).tensors(engine)
    engine.tasks[2].param_weight.shared_embedding = True
    assert [name for name, *_ in Megatron(0, 2).tensors(engine)] == ["hf.embedding.word_embeddings.weight", "hf.layer"]


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
    sources = [Megatron(rank, 2) for rank in range(2)]
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


def test_parameters_that_the_architecture_collects_are_refused(engine):
    collects = SimpleNamespace(maybe_modify_converted_hf_weight=lambda task, tensors, checkpoint: {})
    engine.bridge._model_bridge, engine.bridge.hf_pretrained = collects, SimpleNamespace(state={}, config=None)
    with pytest.raises(Unsupported, match=r"embedding.* fuses it with other parameters into one checkpoint tensor"):
        Megatron(0, 1).tensors(engine)
