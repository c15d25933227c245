"""How an engine was started, as the patches find it: its checkpoint's headers, and who has seen its dummy weights."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from sglang_reshard.patches.engine_start import engine_start, randomize
from sglang_reshard.trace.initial_values import kept_values
from sglang_reshard.trace.live import live_tensors


def runner_on(folder, load_format="auto", **arguments):
    """What the patches ask of a model runner."""
    defaults = {"speculative_draft_load_format": None, "speculative_draft_model_path": None}
    of_drafts = defaults | {"speculative_draft_model_revision": None} | arguments
    return SimpleNamespace(
        model=torch.nn.Linear(2, 2),
        model_config=SimpleNamespace(model_path=str(folder), revision=None),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        server_args=SimpleNamespace(model_path=str(folder), load_format=load_format, **of_drafts),
    )


def dummy_values(model, value):
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.k_scale = torch.nn.Parameter(torch.tensor(-1.0), requires_grad=False)
        self.register_buffer("normalizer", torch.tensor(4.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def test_buffers_and_scales_of_the_kv_cache_are_spared_by_dummy_weights():
    """-1 stands for "not set", which SGLang turns into 1; any other value would be taken for one that was loaded."""
    model = Attention()
    randomize(dummy_values, model, 0.5)
    assert model.weight.tolist() == [0.5] * 3
    assert (model.k_scale.item(), model.normalizer.item()) == (-1.0, 4.0)
    assert kept_values(model)["weight"].tolist() == [0] * 3
    assert [name for name, _ in live_tensors(model)] == ["weight", "k_scale", "normalizer", "cache"]


def test_a_draft_with_a_checkpoint_of_its_own_gets_that(tmp_path):
    own = tmp_path / "draft"
    own.mkdir()
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    save_file({"fc": torch.zeros(2)}, own / "model.safetensors")
    drafts = [torch.nn.Linear(1, 1)]
    with_own = engine_start(runner_on(tmp_path, speculative_draft_model_path=str(own)), drafts)
    assert [s.name for s in with_own.specs] == ["weight", "draft.fc"]
    same = engine_start(runner_on(tmp_path, speculative_draft_model_path=str(tmp_path)), drafts)
    assert [s.name for s in same.specs] == ["weight"]


def test_what_is_not_known_says_why(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert "has no safetensors" in engine_start(runner_on(tmp_path), []).unknown
    elsewhere = engine_start(runner_on("nobody/has-this-model"), [])
    assert (elsewhere.specs, elsewhere.unknown) == (None, "nobody/has-this-model is not on this host")
    several = runner_on(tmp_path)
    several.model.secondary_weights = ["another"]
    assert "in several folders" in engine_start(several, []).unknown


def test_models_on_dummy_weights_that_nobody_has_seen_are_named(tmp_path):
    runner, draft = runner_on(tmp_path, load_format="dummy"), torch.nn.Linear(1, 1)
    assert [id(model) for model in engine_start(runner, [draft]).randomized] == [id(runner.model), id(draft)]
    randomize(dummy_values, runner.model, 0.5)
    assert [id(model) for model in engine_start(runner, [draft]).randomized] == [id(draft)]
    loaded = runner_on(tmp_path, load_format="dummy", speculative_draft_load_format="auto")
    assert [id(model) for model in engine_start(loaded, [draft]).randomized] == [id(loaded.model)]
