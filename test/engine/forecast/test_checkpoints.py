"""The tensors of a checkpoint, from its config alone, are those that its files have; presets are of published size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_reshard.cli.plan.checkpoint import prepare, specs_of
from sglang_reshard.errors import Mismatch, Unsupported
from support.checkpoints import write_checkpoint

pytestmark = pytest.mark.engine

# Parameters and bytes of the checkpoints that the presets are configs of, as published.
PUBLISHED = {
    "qwen3-8b": (8_190_735_360, 16_381_470_720),
    "qwen3-30b-a3b": (30_532_122_624, 61_064_245_248),
    "qwen3-235b-a22b": (235_093_634_560, 470_187_269_120),
    "llama-3.1-70b": (70_553_706_496, 141_107_412_992),
    "deepseek-v3": (671_026_419_200, None),
}
KEPT_IN_FLOAT32 = "e_score_correction_bias"


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_size(preset: str, tmp_path: Path) -> None:
    parameters, nbytes = PUBLISHED[preset]
    specs = specs_of(prepare(preset, 0, tmp_path))
    assert sum(s.numel for s in specs if not s.name.endswith("_scale_inv")) == parameters
    if nbytes is not None:
        assert sum(s.nbytes for s in specs) == nbytes


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    "writer",
    [
        "Qwen3ForCausalLM",
        "LlamaForCausalLM",
        "Gemma3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "MixtralForCausalLM",
        "DeepseekV3ForCausalLM",
    ],
)
def test_a_config_tells_what_the_files_have(writer: str, fp8: bool, tmp_path: Path) -> None:
    folder, into = tmp_path / "model", tmp_path / "config"
    assert write_checkpoint(writer, folder, fp8=fp8)
    into.mkdir()
    (into / "config.json").write_text((folder / "config.json").read_text())

    def told(of: Path) -> dict[str, tuple[tuple[int, ...], str]]:
        return {s.name: (s.shape, "" if s.name.endswith(KEPT_IN_FLOAT32) else s.dtype) for s in specs_of(of)}

    assert told(into) == told(folder)


def test_layers_that_the_config_does_not_count_are_left_out(tmp_path: Path) -> None:
    assert write_checkpoint("Qwen3ForCausalLM", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {s.name for s in specs_of(tmp_path)}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] - 1}))
    last = f"layers.{config['num_hidden_layers'] - 1}."
    assert {s.name for s in specs_of(tmp_path)} == {name for name in whole if last not in name} < whole


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"architectures": ["NoSuchForCausalLM"]},
            Unsupported,
            "NoSuchForCausalLM.*give a folder with its safetensors",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, Unsupported, "awq.*give a folder with its safetensors"),
        ({"hidden_size": "wide"}, Mismatch, "transformers makes no Qwen3ForCausalLM"),
    ],
)
def test_a_config_that_does_not_tell(
    changes: dict[str, object], error: type[Exception], words: str, tmp_path: Path
) -> None:
    folder = prepare("qwen3-8b", 1, tmp_path)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=words):
        specs_of(folder)
