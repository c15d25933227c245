"""A PEFT model's tensors by their checkpoint names, and configurations that SGLang would serve otherwise than PEFT."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.protocol.messages import LoraAdapter
from sglang_reshard.sources import FlatBuffer, FlatMember, adapter_config, adapter_tensors, base_tensors, lora
from sglang_reshard.sources.lora_config import check_base
from sglang_reshard.trainer.options import UpdateOptions

PAIR = ("lora_A.default.weight", "lora_B.default.weight")
PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": {"up", "down"}, "bias": "none"}


class Adapted(nn.Module):
    """Named as PEFT names it, with two adapters on one of two projections."""

    def __init__(self):
        super().__init__()
        base = self.base_model = nn.Module()
        layer = base.model = nn.Module()
        layer.up, layer.down = nn.Module(), nn.Linear(3, 2, bias=False)
        layer.up.base_layer = nn.Linear(2, 3)
        for matrix, shape in (("lora_A", (4, 2)), ("lora_B", (3, 4))):
            adapters = nn.ModuleDict({name: nn.Linear(*shape[::-1], bias=False) for name in ("default", "other")})
            setattr(layer.up, matrix, adapters)


def test_adapter_and_base_have_their_checkpoint_names():
    model = Adapted()
    up = model.base_model.model.up
    adapter = dict(adapter_tensors(model))
    assert {name: id(t) for name, t in adapter.items()} == {
        "base_model.model.up.lora_A.weight": id(up.lora_A["default"].weight),
        "base_model.model.up.lora_B.weight": id(up.lora_B["default"].weight),
    }
    other = dict(adapter_tensors(model, "other"))
    assert other.keys() == adapter.keys()
    assert other["base_model.model.up.lora_A.weight"] is up.lora_A["other"].weight
    assert sorted(name for name, _ in base_tensors(model)) == ["down.weight", "up.bias", "up.weight"]
    with pytest.raises(Mismatch, match="no LoRA adapter 'third'"):
        adapter_tensors(model, "third")


@pytest.mark.parametrize(
    ("name", "adapter", "refused"),
    [
        ("up.lora_diag.default", "default", True),
        ("up.lora_diag.default", "other", False),
        ("up.lora_magnitude_vector.default.weight", "default", True),
        ("up.lora_B.default.bias", "default", True),
        ("up.gate.default", "default", True),
        ("up.gate.other", "default", False),
        ("up.lora_shared", "default", True),
        ("up.lora_velora_embed.default", "default", False),
        # Outside of its layers.
        ("head.modules_to_save.default.weight", "default", True),
        ("embed.token_adapter.trainable_tokens_delta.default", "default", True),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_every_other_parameter_of_an_adapter_is_refused_by_its_name(name, adapter, refused, flat, monkeypatch):
    of_layer = [f"up.{n}" for n in (*PAIR, *(p.replace("default", "other") for p in PAIR))]
    listed = [f"base_model.model.{n}" for n in (*of_layer, name)]
    members = tuple(FlatMember(n, (4, 2), 8 * i) for i, n in enumerate(listed))
    rows = (
        [("flat", torch.zeros(40), FlatBuffer(members, ((0, 0, 40),)))]
        if flat
        else [(n, torch.zeros(4, 2)) for n in listed]
    )
    monkeypatch.setattr(lora, "named_shards", lambda module: rows)
    if refused:
        with pytest.raises(Unsupported, match=f"base_model.model.{name} is a parameter of the adapter {adapter}"):
            adapter_tensors(nn.Module(), adapter)
    else:
        found = adapter_tensors(nn.Module(), adapter)
        assert len(found[0][2].members if flat else found) == 2


def test_of_a_flat_buffer_only_what_is_meant_is_a_member(monkeypatch):
    members = (
        FlatMember("base_model.model.up.base_layer.weight", (3, 2), 0),
        FlatMember("base_model.model.up.lora_A.default.weight", (4, 2), 6),
        FlatMember("base_model.model.up.lora_B.default.weight", (2, 4), 14),
    )
    buffer, piece = FlatBuffer(members, ((0, 0, 22),)), torch.zeros(22)
    alone = FlatBuffer(members[:1], ((0, 0, 6),))
    monkeypatch.setattr(lora, "named_shards", lambda module: [("flat", piece, buffer), ("rest", piece[:6], alone)])
    ((name, given, meant),) = adapter_tensors(nn.Module())
    assert (name, meant.ranges) == ("flat", buffer.ranges)
    assert given is piece
    assert meant.members == (
        FlatMember("base_model.model.up.lora_A.weight", (4, 2), 6),
        FlatMember("base_model.model.up.lora_B.weight", (2, 4), 14),
    )
    assert adapter_tensors(nn.Module())[0][2] is meant, "the same object says that nothing has changed"
    assert [row[2].members[0].name for row in base_tensors(nn.Module())] == ["up.weight", "up.weight"]


def test_the_configuration_is_what_sglang_computes_with():
    expected = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["down", "up"]}
    assert json.loads(adapter_config(PLAIN)) == expected
    assert json.loads(adapter_config({"default": PLAIN})) == expected
    assert json.loads(adapter_config(PLAIN | {"target_modules": "all-linear"}))["target_modules"] == "all-linear"


@pytest.mark.parametrize("rank", [1, 2, 4, 6, 64, 100])
@pytest.mark.parametrize("alpha", [1, 8, 12.5, 32])
def test_of_rslora_sglangs_scaling_is_pefts(rank, alpha):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, use_rslora=True, target_modules=["up"])
    model = peft.get_peft_model(nn.ModuleDict({"up": nn.Linear(2, 3)}), config)
    given = json.loads(adapter_config(model))
    # As SGLang's LoRAAdapter computes it; its batches then have it in float32.
    scaling = torch.tensor(given["lora_alpha"] / given["r"], dtype=torch.float32)
    assert scaling == torch.tensor(model.base_model.model["up"].scaling["default"], dtype=torch.float32)


def trained(options: dict[str, Any], adapter: str = "default") -> tuple[Any, Any]:
    """Returns a small model as it was before PEFT, and PEFT's, whose adapter has been trained a little."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

    def built() -> nn.Module:
        torch.manual_seed(0)
        layers = [
            nn.ModuleDict({"up": nn.Linear(8, 12), "down": transformers.pytorch_utils.Conv1D(8, 12)}) for _ in "ab"
        ]
        return Stack(layers)

    model = peft.get_peft_model(
        built(), peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ["up"]} | options), adapter
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    return built(), model.eval()


class Stack(nn.Module):
    def __init__(self, layers: list[nn.ModuleDict]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["down"](layer["up"](x).relu())
        return x


def served(base: nn.Module, model: nn.Module, config: str) -> torch.Tensor:
    """What SGLang computes: the base weights of the engine, plus lora_alpha / r * B @ A of what is sent."""
    options, matrices = json.loads(config), dict(adapter_tensors(model))
    with torch.no_grad():
        for name in [n.removesuffix(".lora_A.weight") for n in matrices if n.endswith(".lora_A.weight")]:
            change = matrices[f"{name}.lora_B.weight"] @ matrices[f"{name}.lora_A.weight"]
            weight = base.get_submodule(name.removeprefix("base_model.model.")).weight
            weight += options["lora_alpha"] / options["r"] * (change if weight.shape == change.shape else change.T)
    return base(INPUT)


INPUT = torch.linspace(-1, 1, 24).view(3, 8)
CONV = {"target_modules": ["up", "down"], "fan_in_fan_out": True}


@pytest.mark.parametrize(
    "options",
    [
        *({"init_lora_weights": init} for init in (True, False, "gaussian", "Gaussian", "eva", "orthogonal", "mica")),
        {"use_rslora": True},
        {"lora_dropout": 0.5},
        {"layers_to_transform": 0, "layers_pattern": "layers"},
        {"exclude_modules": ["layers.0.up"]},
        {"target_modules": "all-linear"},
        CONV,
        {"velora_config": {"num_groups": 2}},
        {"bias": "none", "qalora_group_size": 8, "megatron_core": "other", "revision": "main", "inference_mode": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out", "ignore:`init_lora_weights` is 'eva'")
def test_what_is_accepted_is_what_sglang_computes(options):
    base, model = trained(options)
    expected, before = model(INPUT), base(INPUT)
    assert (expected - before).abs().max() > 1e-3, "the adapter has an effect"
    torch.testing.assert_close(served(base, model, adapter_config(model)), expected)
    saved = model.peft_config["default"].to_dict()  # as in adapter_config.json
    assert adapter_config(json.loads(json.dumps(saved, default=list))) == adapter_config(model)


def test_the_base_is_that_of_all_adapters():
    peft = pytest.importorskip("peft")
    _, model = trained({})
    check_base(adapter_config(model))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["up"], init_lora_weights="pissa"))
    with pytest.raises(Unsupported, match="init_lora_weights='pissa'"):
        check_base(adapter_config(model))


@pytest.mark.parametrize("init", ["corda", "loftq", "lora_ga", "PiSSA", "newer"])
def test_other_initializations_need_their_base_or_are_refused(init):
    with pytest.raises(Unsupported, match=f"init_lora_weights='{init}'"):
        check_base(adapter_config(PLAIN | {"init_lora_weights": init}))


# Of the LoraConfig that is installed: accepted with any value, and with some. All other fields must be unset.
ANY = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "fan_in_fan_out"),
    *("inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config"),
    *("megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type", "velora_config"),
    *("lora_alpha", "r", "use_rslora"),
}
SOME = {"bias", "init_lora_weights", "peft_type", "target_modules", "target_parameters"}


def test_a_field_that_peft_adds_fails_closed():
    peft = pytest.importorskip("peft")
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)}

    for name in names - SOME - ANY:
        with pytest.raises(Unsupported, match=f"{name}=3"):
            adapter_config(PLAIN | {name: 3})
    for name in ANY:
        adapter_config(PLAIN | {name: 3})
    assert names >= SOME | ANY
    adapter_config(PLAIN | {name: None for name in names - PLAIN.keys()})
    for unset in (None, False, [], {}, ""):
        adapter_config(PLAIN | {"newer_option": unset})
    with pytest.raises(Unsupported, match="newer_option='fast': SGLang does not serve this option"):
        adapter_config(PLAIN | {"newer_option": "fast"})


def scaled(model: Any) -> None:
    model.base_model.model.layers[1]["up"].set_scale("default", 0.5)


def changed(model: Any) -> None:
    model.peft_config["default"].lora_alpha = 16


def combined(model: Any) -> None:
    import peft

    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["up"]))
    model.base_model.set_adapter(["default", "other"])


def tied(model: Any) -> None:
    first, second = (layer["up"].lora_A["default"] for layer in model.base_model.model.layers)
    second.weight = first.weight


def tied_whole(model: Any) -> None:
    first, second = (layer["up"] for layer in model.base_model.model.layers)
    second.lora_A["default"].weight, second.lora_B["default"].weight = (
        first.lora_A["default"].weight,
        first.lora_B["default"].weight,
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (scaled, r"layers.1.up scales the adapter default by 0.75, but its configuration by 1.5"),
        (lambda model: model.base_model.model.layers[0]["up"].scale_layer(3), "layers.0.up scales the adapter"),
        (changed, "layers.0.up scales the adapter default by 1.5, but its configuration by 4"),
        (lambda model: model.merge_adapter(), "LoRA adapters default are merged .* call unmerge_adapter"),
        (lambda model: model.disable_adapter_layers(), "adapters are disabled; call enable_adapter_layers"),
        (combined, "computes with the adapters default, other at once"),
        (tied, "layers.1.up: the module does not list both its lora_A and its lora_B"),
        (tied_whole, "layers.1.up: the module does not list both its lora_A and its lora_B"),
    ],
)
def test_a_model_that_computes_otherwise_now_is_refused(change, said):
    _, model = trained({})
    plain = adapter_config(model)
    change(model)
    with pytest.raises(Unsupported, match=said):
        adapter_tensors(model)
    if "lora_A" not in said:
        with pytest.raises(Unsupported, match=said):
            adapter_config(model)
    assert plain


def test_states_that_change_nothing_pass():
    peft = pytest.importorskip("peft")
    base, model = trained({})
    expected = model(INPUT)
    layer = model.base_model.model.layers[0]["up"]
    layer.scale_layer(0.1)
    layer.unscale_layer(0.1)
    model.merge_adapter()
    model.unmerge_adapter()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["up"], init_lora_weights=False))
    model.set_adapter("other")  # the adapter that is sent is named, and need not be active
    torch.testing.assert_close(served(base, model, adapter_config(model)), expected)
    model.add_weighted_adapter(["default", "other"], [1.0, 0.5], "both", combination_type="cat")
    model.set_adapter("both")
    base, _ = trained({})
    with torch.no_grad():
        for name, tensor in adapter_tensors(model, "both"):
            assert tensor.shape[0 if "lora_A" in name else 1] == json.loads(adapter_config(model, "both"))["r"] == 6


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"alora_invocation_tokens": [1, 2]},
        {"alpha_pattern": {"layers.1.up": 3}},
        {"lora_bias": True},
        {"modules_to_save": ["layers.0.down"]},
    ],
    ids=str,
)
def test_tensors_are_refused_whatever_configuration_is_passed(options, monkeypatch):
    _, model = trained(options)
    with pytest.raises(Unsupported, match=f"{next(iter(options))}="):
        adapter_tensors(model)
    monkeypatch.setattr(lora, "check_options", lambda options: None)
    with pytest.raises(Unsupported):
        adapter_tensors(model)


def test_merged_weights_say_so():
    _, model = trained({})
    assert UpdateOptions.of(None, {}, base_tensors(model)).merged == UpdateOptions.of(None, {}, model).merged == ()
    listed = base_tensors(model)
    model.merge_adapter()
    for weights in (listed, base_tensors(model), model):
        assert UpdateOptions.of(None, {"staged": True}, weights).merged == ("default",)
    assert sorted(name for name, _ in base_tensors(model))[:2] == ["layers.0.down.bias", "layers.0.down.weight"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True}, "use_dora=True: SGLang does not serve DoRA"),
        ({"rank_pattern": {"up": 8}}, "ranks that differ"),
        ({"modules_to_save": ["head"]}, "whole modules"),
        ({"bias": "all"}, "bias='all'"),
        ({"target_modules": ".*up"}, "is a pattern"),
        ({"peft_type": "IA3"}, "peft_type=IA3"),
    ],
)
def test_what_sglang_would_ignore_is_refused(options, said):
    with pytest.raises(Unsupported, match=said.replace("(", r"\(").replace(".*", r"\.\*")):
        adapter_config(PLAIN | options)


@pytest.mark.parametrize("config", ["", "[]", PLAIN, "policy.json"])
def test_what_is_no_configuration_is_refused(config):
    with pytest.raises(Mismatch, match=r"pass adapter_config\(model\)"):
        UpdateOptions(lora=[LoraAdapter("policy", config)])


def test_a_pattern_of_modules_may_be_written_out():
    _, model = trained({"target_modules": r"layers\.\d\.up"})
    with pytest.raises(Unsupported, match="is a pattern"):
        adapter_config(model)
    assert len(adapter_tensors(model)) == 4
    written = model.peft_config["default"].to_dict() | {"target_modules": ["up"]}
    assert json.loads(adapter_config(written))["target_modules"] == ["up"]


def test_an_incomplete_configuration_is_refused_by_name():
    with pytest.raises(Mismatch, match="lacks lora_alpha, target_modules"):
        adapter_config({"r": 4})
