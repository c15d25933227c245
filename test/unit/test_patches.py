"""What the patches decide without SGLang."""

from types import SimpleNamespace

import pytest
import torch

from sglang_reshard.patches.model_runner import repacked


def model_with(**attributes):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for name, value in attributes.items():
        setattr(model[1], name, value)
    return model


def test_a_plain_model_is_not_repacked():
    assert repacked(model_with()) == ""
    assert repacked(model_with(use_intel_amx_backend=False, quant_method=SimpleNamespace())) == ""


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"use_intel_amx_backend": True}, "AMX"),
        ({"quant_method": SimpleNamespace(use_flashinfer_trtllm_moe=True)}, "moe_runner_backend"),
    ],
)
def test_repacked_weights_are_refused_by_name(attributes, says):
    reason = repacked(model_with(**attributes))
    assert reason.startswith("1 was")
    assert says in reason
