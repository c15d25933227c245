"""What the patches decide without SGLang."""

from types import SimpleNamespace

import pytest
import torch

from sglang_reshard.patches import repacking
from sglang_reshard.trace.repack import repacked_modules


def model_with(**attributes):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for name, value in attributes.items():
        setattr(model[1], name, value)
    return model


def scales(dtype):
    return torch.nn.Parameter(torch.ones(1, 1, dtype=dtype), requires_grad=False)


REORDERED = [
    ({"use_intel_amx_backend": True}, "packed for AMX"),
    ({"use_flashinfer_trtllm_moe": True}, "reordered for flashinfer-trtllm"),
    ({"weight_scale_inv": scales(torch.int32)}, "requantized for DeepGEMM"),
]
AS_LOADED = [
    {},
    {"use_intel_amx_backend": False, "use_flashinfer_trtllm_moe": False},
    {"weight_scale_inv": scales(torch.float32)},  # block-fp8's own
    {"weight_scale_inv": scales(torch.uint8)},  # MXFP8's, which the checkpoint has as UE8M0
]


@pytest.mark.parametrize("attributes", AS_LOADED)
def test_weights_as_they_were_loaded_are_not_refused(attributes):
    assert repacking.refusal(model_with(**attributes)) == ""


@pytest.mark.parametrize(("attributes", "says"), REORDERED)
def test_reordered_weights_that_nobody_remembers_are_refused_by_name(attributes, says):
    assert repacking.refusal(model_with(**attributes)).startswith(f"1 was {says}")


class UnquantizedMethod:
    def process_weights_after_loading(self, layer):
        pass


class Fp8LinearMethod(UnquantizedMethod):
    quant_config = SimpleNamespace(weight_block_size=[128, 128])


class OtherMethod(UnquantizedMethod):
    quant_config = SimpleNamespace(weight_block_size=[1, 32], use_mxfp8=True)


@pytest.mark.parametrize("attributes", AS_LOADED)
@pytest.mark.parametrize(
    ("method", "differs"), [(UnquantizedMethod, False), (Fp8LinearMethod, False), (OtherMethod, True)]
)
def test_a_method_that_may_move_elements_runs_again(attributes, method, differs):
    """Shapes do not tell: flashinfer's GEMM for MXFP8 shuffles in place."""
    model = model_with(**attributes, quant_method=method())
    repacking.remember(model)
    assert repacking.refusal(model) == ""
    assert [m.path for m in repacked_modules(model)] == ["1"] * differs


@pytest.mark.parametrize(("attributes", "says"), REORDERED)
def test_reordered_weights_are_reordered_again(attributes, says):
    del says
    model = model_with(quant_method=UnquantizedMethod())
    repacking.remember(model)
    for name, value in attributes.items():
        setattr(model[1], name, value)
    assert repacking.refusal(model) == ""
    assert [m.path for m in repacked_modules(model)] == ["1"]


class DispatchingMethod:
    """As NVFP4's: the dispatcher of experts gets the scale of activations."""

    def process_weights_after_loading(self, layer):
        layer.scale = torch.nn.Parameter(layer.weight.data.amax() * layer.dispatcher.ranks, requires_grad=False)
        layer.dispatcher.set_quant_config({"input_global_scale": layer.scale})


class Dispatcher:
    ranks, quant_config = 2, None

    def set_quant_config(self, quant_config):
        self.quant_config = quant_config


def test_a_live_dispatcher_keeps_the_live_scale():
    """It got one of the copy that is post-processed, which a rehearsal makes of random values."""
    model = model_with(quant_method=DispatchingMethod(), dispatcher=Dispatcher())
    repacking.remember(model)
    experts = model[1]
    experts.quant_method.process_weights_after_loading(experts)
    (module,) = repacked_modules(model)
    made = module.run({"weight": torch.full((2, 2), 3.0), "bias": torch.zeros(2)})
    assert made["scale"] == 6
    assert experts.dispatcher.quant_config["input_global_scale"] is experts.scale
