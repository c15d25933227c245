"""A forecast asks for what was meant, lays a trainer out as it would be, and says the bytes of the very transports."""

import json
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sglang_reshard.cli.layouts import Source
from sglang_reshard.cli.main import app
from sglang_reshard.cli.plan.checkpoint import prepare, with_layers
from sglang_reshard.cli.plan.rank_model import RankModel, buckets_bytes, engine_load
from sglang_reshard.cli.plan.request import layout_of
from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.layout.source_layout import Mesh
from sglang_reshard.plan import ClusterTopology, rank_demand
from sglang_reshard.protocol.validation import check_layout
from sglang_reshard.routes import choose_strategy
from sglang_reshard.routes.p2p.messages import send_request
from sglang_reshard.routes.p2p.trainer import P2pSender
from sglang_reshard.sources import Placement
from sglang_reshard.trace.program import Program
from sglang_reshard.trace.tracer import trace
from support.plans import HOST, copies_of, empty_targets, meshed_layouts, read_plans, values
from support.plans import shards as cut_shards
from support.sent import CPU, reads_of, receiving
from support.sweep import examples

QUESTION = ["--source", "tp=4", "--target", "tp=8"]


# -- the question


def test_plotting_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = CliRunner().invoke(app, ["plan", "qwen3-8b", "--plot", "a.png", *QUESTION])
    assert said.exit_code == 2
    assert "sglang-reshard[bench]" in said.output


# -- the model


def test_a_folder_is_taken_as_it_is_and_shortened_beside_it(tmp_path):
    folder, into = tmp_path / "model", tmp_path / "into"
    folder.mkdir()
    into.mkdir()
    config = {"architectures": ["A"], "num_hidden_layers": 4, "layer_types": ["a", "b", "a", "b"], "sizes": [1, 2]}
    (folder / "config.json").write_text(json.dumps(config))
    assert prepare(str(folder), 0, into) == folder
    assert prepare(str(folder / "config.json"), 2, into) == into
    shorter = json.loads((into / "config.json").read_text())
    assert shorter == config | {"num_hidden_layers": 2, "layer_types": ["a", "b"]}
    assert json.loads((folder / "config.json").read_text()) == config


def test_layers_of_a_part_of_a_config():
    config = {"architectures": ["A"], "text_config": {"num_hidden_layers": 3}}
    assert with_layers(config, 1)["text_config"]["num_hidden_layers"] == 1
    with pytest.raises(Mismatch, match="the model has 3"):
        with_layers(config, 4)


# -- the source layout

SPECS = [
    TensorSpec("model.embed_tokens.weight", (101, 16), "bfloat16"),
    TensorSpec("model.layers.0.self_attn.q_proj.weight", (32, 16), "bfloat16"),
    TensorSpec("model.layers.0.self_attn.q_proj.bias", (32,), "bfloat16"),
    TensorSpec("model.layers.0.self_attn.o_proj.weight", (16, 32), "float8_e4m3fn"),
    TensorSpec("model.layers.0.self_attn.o_proj.weight_scale_inv", (1, 2), "float32"),
    TensorSpec("model.layers.0.self_attn.o_proj.bias", (16,), "bfloat16"),
    TensorSpec("model.layers.0.mlp.gate.weight", (4, 16), "bfloat16"),
    TensorSpec("model.layers.0.mlp.experts.0.gate_proj.weight", (8, 16), "bfloat16"),
    TensorSpec("model.layers.0.input_layernorm.weight", (16,), "bfloat16"),
    TensorSpec("model.layers.0.scale", (), "float32"),
]


def placed(source):
    layout = layout_of(SPECS, source)
    check_layout(layout, source.ranks)
    return {t.name.removeprefix("model.layers.0."): layout.sharding(t) for t in layout.tensors}


def test_tensor_parallel_splits_rows_into_a_block_and_columns_out_of_it():
    dims = {name: sharding.placements[0].dim for name, sharding in placed(Source(tp=2)).items()}
    assert [dims[n] for n in ("model.embed_tokens.weight", "self_attn.q_proj.weight", "self_attn.q_proj.bias")] == [
        0
    ] * 3
    assert dims["mlp.experts.0.gate_proj.weight"] == 0
    assert [dims[f"self_attn.o_proj.{n}"] for n in ("weight", "weight_scale_inv", "bias")] == [1, 1, -1]
    assert [dims[n] for n in ("mlp.gate.weight", "input_layernorm.weight", "scale")] == [-1] * 3


def test_fsdp_splits_what_tensor_parallelism_has_left():
    of = placed(Source(fsdp=4, tp=2))
    mesh = Mesh((4, 2), tuple(range(8)))
    tensor_parallel_first = Mesh((2, 4), (0, 2, 4, 6, 1, 3, 5, 7))
    assert of["self_attn.q_proj.weight"] == (tensor_parallel_first, (Placement(0), Placement(0)))
    assert of["self_attn.o_proj.weight"] == (mesh, (Placement(0), Placement(1)))
    assert of["input_layernorm.weight"] == (mesh, (Placement(0), Placement()))
    assert of["scale"] == (mesh, (Placement(), Placement()))


# -- what moves


def model_of(demand, plan, targets):
    targets = {name: tensor.to("meta") for name, tensor in targets.items()}
    return RankModel(demand, plan, Program(tuple(plan.copies), targets))


@settings(max_examples=examples(150))
@given(data=st.data(), bucket=st.sampled_from([1, 100, 1000, 1 << 20]))
def test_loads_are_those_of_the_transports(data, bucket):
    layout = data.draw(meshed_layouts())
    copies = [data.draw(copies_of(layout)) for _ in range(data.draw(st.integers(1, 3)))]
    index, plans = read_plans(layout, copies)
    demands = [rank_demand(index, t, HOST) for t in plans]
    topology = ClusterTopology.of(demands, (HOST,) * layout.trainer_ranks)
    strategy = choose_strategy("p2p", index, demands, topology, bucket)
    whole, loads = values(layout), []
    for e, t in enumerate(plans):
        targets = empty_targets(copies[e])
        loads.append(engine_load(index, strategy, e, model_of(demands[e], t, targets), bucket))
        end = receiving(reads_of(e, index, t, targets), strategy, None)
        figures = loads[e].figures
        assert figures.received_bytes == end.traffic.received_bytes
        assert figures.extra_bytes == end.nbytes
        assert {t: link.payload_bytes for t, link in loads[e].links.items()} == end.traffic.read_bytes
    for trainer_rank in range(layout.trainer_ranks):
        receivers = {e: int(s) for e, s in enumerate(strategy.round_bytes[trainer_rank]) if s}
        orders = {e: send_request(plans[e], trainer_rank) for e in receivers}
        outlet = P2pSender(layout, cut_shards(layout, whole, trainer_rank), orders, receivers, CPU)
        mine = [load.links[trainer_rank] for load in loads if trainer_rank in load.links]
        assert buckets_bytes((link.sent_messages, link.sent_bucket_bytes) for link in mine) == outlet.extra_bytes
        assert sum(link.payload_bytes for link in mine) == outlet.sent_bytes


# -- a model without memory


class InHostMemory(torch.nn.Module):
    """Names a device for one of its parameters, whatever the default is."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(4, 3))
        self.bias = torch.nn.Parameter(torch.empty(4, device="cpu"))

    def load_weights(self, weights):
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


def test_a_module_that_names_a_device_itself_is_traced_as_one_in_memory():
    specs = [TensorSpec("weight", (4, 3), "float32"), TensorSpec("bias", (4,), "float32")]
    real = trace(InHostMemory(), specs)
    with torch.device("meta"):
        model = InHostMemory()
    assert {p.device.type for p in model.parameters()} == {"meta", "cpu"}
    assert trace(model, specs, weightless=True).copies == real.copies
    with pytest.raises(Unsupported, match="neither a parameter, a buffer"):
        trace(model, specs)  # of a live engine meta tensors are left out
