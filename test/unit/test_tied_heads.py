"""A head that the trainer lists apart from its embedding: equal is taken, different is refused as what it is."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from sglang_reshard.errors import ReshardError
from sglang_reshard.sources import describe
from sglang_reshard.trainer import publisher
from sglang_reshard.trainer.tied_heads import TiedHeads, judged
from support.toy import checkpoint
from support.toy_serving import serve
from support.world import run_world

HEAD, EMBEDDING = "lm_head.weight", "embed.weight"


def sharded(weights, head=None):
    """Weights in rows, and the head apart from the embedding."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rows = {n: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for n, t in weights.items()}
    rows[HEAD] = distribute_tensor(weights[EMBEDDING].clone(), mesh, [head or Shard(0)], src_data_rank=None)
    return rows


def become(state, version):
    weights = checkpoint(version)
    for name, tensor in sharded(weights, state[HEAD].placements[0]).items():
        state[name].to_local().copy_(tensor.to_local())


def told_by(update):
    try:
        report = update()
    except ReshardError as error:
        return str(error)
    return "trace" in report.seconds, report.message


def train_apart(trainer, how):
    sender = trainer.sender(transport="p2p")
    state = sharded(checkpoint(1))

    def update():
        return sender.update_async(state).wait() if how == "async" else sender.update(state, partial=how == "partial")

    told = [told_by(update)]
    become(state, 2)
    told.append(told_by(update))
    become(state, 3)
    if trainer.rank == 1:  # in one bit of one rank
        state[HEAD].to_local().view(torch.int32)[-1, -1] += 1
    told.append(told_by(update))
    become(state, 4)
    told.append(told_by(update))
    return told


@pytest.mark.parametrize("how", ["update", "async", "partial"])
def test_it_is_compared_in_every_update_and_refused_by_the_rank_that_differs(how):
    told, found = run_world(2, 2, train_apart, serve, how)
    assert told[0] == told[1]
    first, warm, refused, healed = told[0]
    remark = f"the engine does not read {HEAD}"
    assert first == (True, remark)
    assert warm == (False, remark)
    assert f"trainer rank 1: {HEAD} differs from {EMBEDDING}, but the engine ties the two" in refused
    assert "ignore" not in refused
    assert healed[1] == remark
    assert found == [[1, 2, 2, 4]] * 2  # nothing was written by the one that was refused


def train_incomparable(trainer, kind):
    sender = trainer.sender()
    state = sharded(checkpoint(1), Replicate() if kind == "sharding" else Shard(0))
    if kind == "dtype":
        state[HEAD] = state[HEAD].to(torch.bfloat16)
    told = told_by(lambda: sender.update(state))
    return told


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("sharding", f"{HEAD} is sharded differently from {EMBEDDING}"),
        ("dtype", f"{HEAD} is bfloat16, but {EMBEDDING} is float32"),
    ],
)
def test_what_cannot_be_compared_is_refused_as_that(kind, why):
    told, found = run_world(2, 1, train_incomparable, serve, kind)
    assert f"trainer rank 0: {why}, so the two cannot be compared, but the engine ties the two" in told[0]
    assert found == [[0]]


def verdict(embedding, head, rank=0):
    """What trainer rank 0 of 1 says of a head."""
    state = describe({"model.embed_tokens.weight": embedding, HEAD: head}, trainer_rank=0, global_ranks=(0,))
    heads = TiedHeads.of(state, rank, list(publisher.heads(state.layout)))
    return heads.compare(dict(enumerate(state.inputs)))


def test_bits_are_compared_whatever_the_dtype_and_strides():
    nan = torch.full((40, 9), float("nan"), dtype=torch.bfloat16)
    assert verdict(nan, nan.clone()) == {HEAD: ""}
    assert verdict(torch.zeros(40, 9), -torch.zeros(40, 9)) == {HEAD: "differs from model.embed_tokens.weight"}
    table = torch.randn(40, 9)
    assert verdict(table, table.t().contiguous().t()) == {HEAD: ""}
    assert verdict(table[:, 1:], table.t().contiguous().t()[:, 1:]) == {HEAD: ""}
    large = torch.randn(300, 100)
    other = large.clone()
    other[-1, -1] += 1
    assert verdict(large, other)[HEAD]
    assert not verdict(large, large.clone())[HEAD]
    in_float8 = large.to(torch.float8_e4m3fn)
    assert not verdict(in_float8, in_float8.clone())[HEAD]


def test_only_tensors_outside_of_layers_with_an_embedding_s_shape_are_compared():
    given = {
        "shared.weight": torch.ones(8, 4),
        "encoder.embed_tokens.weight": torch.ones(8, 4),
        "decoder.embed_positions.weight": torch.ones(6, 4),
        "decoder.block.0.w.weight": torch.ones(8, 4),
        "decoder.norm.weight": torch.ones(8),
        "lm_head.weight": torch.ones(8, 4),
    }
    given["decoder.embed_tokens.weight"] = given["shared.weight"]  # one memory
    state = describe(given, trainer_rank=0, global_ranks=(0,))
    heads = TiedHeads.of(state, 0, list(publisher.heads(state.layout)))
    assert [(pair.name, pair.of) for pair in heads.pairs] == [
        ("encoder.embed_tokens.weight", "shared.weight"),
        ("lm_head.weight", "shared.weight"),
    ]


def test_all_ranks_have_to_agree_that_a_head_is_its_embedding():
    assert judged([{}, {}]) == ((), {})
    assert judged([{"h[0]": ""}, {"h[0]": ""}]) == (("h[[]0]",), {})
    assert judged([{"h": ""}, {"h": "differs from e"}]) == ((), {"h": "trainer rank 1: h differs from e"})
