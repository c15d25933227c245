"""Transformers of SGLang's diffusion engine: an update leaves what a start on the trainer's checkpoint would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.rank_scripts import run_ranks

JOB = Path(__file__).with_name("diffusion_job.py")
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv" / "diffusion"  # what SGLang's diffusion engine imports, next to the project's packages
needs_diffusion = pytest.mark.skipif(
    not FOLDER.exists(), reason="SGLang's diffusion engine has not all that it imports: make setup-diffusion"
)
# Tiny transformers of diffusers, each with two sets of random weights.
CHECKPOINTS = """
import sys, torch, diffusers
rope = (4, 4, 8)
small = dict(num_attention_heads=4, attention_head_dim=16)
kinds = {
    "wan": lambda: diffusers.WanTransformer3DModel(
        **small | dict(attention_head_dim=24), in_channels=4, out_channels=4, text_dim=32, freq_dim=32, ffn_dim=96,
        num_layers=2),
    "flux": lambda: diffusers.FluxTransformer2DModel(
        **small, in_channels=16, num_layers=1, num_single_layers=1, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=rope, guidance_embeds=True),
    "qwen": lambda: diffusers.QwenImageTransformer2DModel(
        **small, in_channels=16, out_channels=4, num_layers=2, joint_attention_dim=32, axes_dims_rope=rope),
}
folder, *names = sys.argv[1:]
torch.manual_seed(0)
for name in names:
    model = kinds[name]()
    for number in (0, 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        model.to(torch.bfloat16).save_pretrained(f"{folder}/{name}-{number}")
"""
NAMES = ("wan", "flux", "qwen")
_LIMIT_S = 300


@needs_diffusion
@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_update_leaves_what_a_start_on_the_checkpoint_would(tp_size, tmp_path):
    path = os.pathsep.join(map(str, (ROOT / "test", ROOT, ROOT / "python", FOLDER)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    made = subprocess.run(
        [sys.executable, "-c", CHECKPOINTS, tmp_path, *NAMES], env=environment, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    arguments = {"checkpoints": [[f"{tmp_path}/{name}-{number}" for number in (0, 1)] for name in NAMES]}
    *engine_ranks, errors = run_ranks(sys.executable, JOB, tp_size + 1, arguments, tmp_path, environment, _LIMIT_S)
    for of_rank in engine_ranks:
        assert len(of_rank) == len(NAMES)
        for name, found in zip(NAMES, of_rank, strict=True):
            assert found["refused"], name  # the update that lacks a bias
            assert found["updated"], name
            assert found["differ"] == [], name
            assert found["changed"] == found["tensors"] > 20, name
            assert found["in_place"], name
    assert len(errors) == len(NAMES)
    assert all("which no tensor of the update reaches" in error for error in errors)
