"""A live engine that was updated twice since a start on dummy weights says what one says that starts on the checkpoint.

In the checkpoint's own dtype: tokens, log-probabilities and every live tensor. What the models compute with is more
than the parameters that are sent: copies that a forward pass makes, buffers that the loader fills, a vision tower that
stays. The engine that starts on the checkpoint is SGLang without the plugin.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from sglang_reshard.errors import ReshardError
from sglang_reshard.patches.sound_weights import SERVE_DUMMY
from sglang_reshard.selftest.digests import read_live_digests
from support.checkpoints import write_checkpoint
from support.live_engines import PROMPTS, WITHOUT_PLUGIN, live_digests, live_engine, stock_engine
from support.sglangs import chosen
from support.tiny_qwen3_vl import PROMPT, write_image, write_qwen3_vl
from support.trainers import run_trainers

NEW_TOKENS = 6


ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")


def placement(name: str, ndim: int) -> Placement:
    """As tensor parallelism has it."""
    if ndim == 1:
        return Replicate()
    return Shard(1 if name.endswith(ROW_PARALLEL) else 0)


def sharded(checkpoint: Path, mesh: DeviceMesh) -> dict[str, DTensor]:
    state = load_file(checkpoint / "model.safetensors")
    return {n: distribute_tensor(t, mesh, [placement(n, t.ndim)], src_data_rank=None) for n, t in state.items()}


def updates(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what is seen of an engine after its start on dummy weights, and after each step.

    steps  of the job, each with the "version" of the checkpoint that is sent, a pattern of names that are left out
           ("without"), and "options" of the update. The last element of the result is of the last step
    """
    folder = Path(job["folder"])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    os.environ[SERVE_DUMMY] = "1"  # what it says before the first update is compared, too
    engine = live_engine(mesh, folder / "1", load_format="dummy", **arguments(job))

    def digests(number: int) -> list[dict[str, str]]:
        return live_digests(engine, folder / f"digests-{number}")

    seen: list[dict[str, Any]] = [{**said(engine.generate, job), "digests": digests(0)}]
    state = sharded(folder / "1", mesh)
    for number, step in enumerate(job["steps"], 1):
        for name, tensor in sharded(folder / step["version"], mesh).items():  # in place, as an optimizer writes
            state[name].to_local().copy_(tensor.to_local())
        sent = [(n, t) for n, t in state.items() if not fnmatchcase(n, step["without"])]
        try:
            report = engine.update_weights_from_tensor(sent, verify="full", **step["options"])
        except ReshardError as error:
            seen.append({"refusal": str(error), "digests": digests(number)})
        else:
            seen.append({"kept": report.kept, **said(engine.generate, job), "digests": digests(number)})
    engine.shutdown()
    return seen


def by_stock(job: dict[str, Any]) -> dict[str, Any]:
    """Returns what is seen of an engine that SGLang starts on the checkpoint, without the plugin."""
    with stock_engine(Path(job["checkpoint"]), **arguments(job)) as engine:
        assert not hasattr(engine, "update_weights_distributed"), "the plugin was loaded"
        return {**said(engine.generate, job), "digests": read_live_digests(engine, Path(job["folder"]) / "digests")}


def arguments(job: dict[str, Any]) -> dict[str, Any]:
    of_images = {"mm_attention_backend": "sdpa"} if job["image"] else {"skip_tokenizer_init": True}
    return {"dtype": "bfloat16", **of_images, **job["server"]}


def said(generate: Callable[..., Any], job: dict[str, Any]) -> dict[str, Any]:
    """Returns the tokens that an engine generates, and their log-probabilities; nothing of one that cannot on a CPU."""
    if not job["generates"]:
        return {"tokens": [], "logprobs": []}
    image = job["image"]
    asked: dict[str, Any] = {"prompt": [PROMPT], "image_data": [image]} if image else {"input_ids": PROMPTS}
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    outputs = generate(sampling_params=sampling, return_logprob=True, **asked)
    logprobs = [[p for p, *_ in o["meta_info"]["output_token_logprobs"]] for o in outputs]
    return {"tokens": [o["output_ids"] for o in outputs], "logprobs": logprobs}


pytestmark = [pytest.mark.engine]
# On a CPU host the newest SGLang has no attention for Gemma-4, and no processor for Qwen3-VL without FFmpeg.
IN_STAGES = pytest.mark.parametrize("staged", [False, pytest.param(True, marks=pytest.mark.sweep)])


def step(version: str, without: str = "", **options: Any) -> dict[str, Any]:
    return {"version": version, "without": without, "options": options}


@pytest.mark.parametrize(
    ("sglang", "staged"),
    [
        ("pinned", False),
        pytest.param("pinned", True, marks=pytest.mark.sweep),
        pytest.param("newest", True, marks=pytest.mark.sweep),
    ],
)
def test_copies_that_a_forward_pass_has_made_are_made_again(sglang: str, staged: bool, tmp_path: Path) -> None:
    for version in ("1", "2"):
        write_checkpoint("Glm4MoeForCausalLM", tmp_path / version, seed=int(version))
    with chosen(sglang):
        dummy, first, second, fresh = seen(tmp_path, [step("1"), step("2", staged=staged)], tmp_path / "2")
    assert_is_fresh(second, fresh, dummy, first)
    copies = [name for name in fresh["digests"][0] if name.endswith("gate._weight_fp32")]
    assert bool(copies) == (sglang == "pinned")  # of the newest the weight itself is float32


@IN_STAGES
def test_buffers_that_the_loader_fills_are_sent_and_a_part_of_a_fused_parameter_stays(
    staged: bool, tmp_path: Path
) -> None:
    for version in ("1", "2"):
        write_gemma4(tmp_path / version, int(version))
    part = "model.layers.1.self_attn.k_proj.weight"
    of_fused = {"without": part, "frozen": [part]}
    steps = [step("1", without="*.layer_scalar"), step("1"), step("2", staged=staged, **of_fused)]
    mixed = write_with_a_part_of(part, tmp_path / "1", tmp_path / "2", tmp_path / "mixed")
    dummy, refused, first, second, fresh = seen(tmp_path, steps, mixed)
    assert "layer_scalar is a buffer that the loader fills" in refused["refusal"]
    assert "state_dict()" in refused["refusal"]
    assert refused["digests"] == dummy["digests"]
    assert second["kept"] == [f"model.layers.1.self_attn.qkv_proj.weight[{part}]"]
    assert_is_fresh(second, fresh, dummy, first)
    assert any(name.endswith("layer_scalar") for name in fresh["digests"][0])


@pytest.mark.sweep
@IN_STAGES
def test_a_frozen_tower_stays_once_it_has_been_sent(staged: bool, tmp_path: Path) -> None:
    for version in ("1", "2", "3"):
        write_qwen3_vl(tmp_path / version, int(version), torch.bfloat16)
    frozen = {"without": "*.visual.*", "frozen": ["visual.*"]}
    steps = [step("1", **frozen), step("1"), step("2", **frozen), step("3", staged=staged, **frozen)]
    mixed = write_with_a_part_of("*.visual.*", tmp_path / "1", tmp_path / "3", tmp_path / "mixed")
    image = str(write_image(tmp_path / "image.png"))
    dummy, refused, first, second, third, fresh = seen(tmp_path, steps, mixed, image)
    assert "visual." in refused["refusal"]
    assert "would stay as they are, and nothing has brought them" in refused["refusal"]
    assert refused["digests"] == dummy["digests"]
    tower = [n for n in fresh["digests"][0] if n.startswith("visual.") and "rotary" not in n]  # computed, not loaded
    assert first["kept"] == []
    assert second["kept"] == third["kept"] == sorted(tower)
    assert_is_fresh(third, fresh, dummy, first, second)


def seen(
    folder: Path,
    steps: list[Any],
    checkpoint: Path,
    image: str = "",
    *,
    generates: bool = True,
    trainers: int = 2,
    **server: Any,
) -> list[dict[str, Any]]:
    """Returns what is seen of an engine on dummy weights and after each step, and last of one on the checkpoint.

    generates  they are asked for tokens
    server     arguments of both engines
    """
    stock = folder / "stock"
    stock.mkdir()
    both = {"image": image, "generates": generates, "server": server}
    updated: list[dict[str, Any]] = run_trainers(trainers, updates, folder, steps=steps, **both)[0]
    fresh = run_trainers(1, by_stock, stock, environment=WITHOUT_PLUGIN, checkpoint=str(checkpoint), **both)
    return updated + fresh


def assert_is_fresh(updated: dict[str, Any], fresh: dict[str, Any], *before: dict[str, Any]) -> None:
    assert updated["tokens"] == fresh["tokens"]
    assert updated["logprobs"] == fresh["logprobs"]
    assert updated["digests"] == fresh["digests"]
    distinct = {str(at["tokens"]) for at in (*before, updated)}
    assert len(distinct) == len(before) + 1, "what it says does not depend on all of the weights"


def write_gemma4(folder: Path, seed: int) -> None:
    head_dim, kv_heads = 16, 2
    # On a CPU SGLang pads experts, and asks for their size also where there are none.
    instead = {"global_head_dim": head_dim, "moe_intermediate_size": 64}
    write_checkpoint("Gemma4ForCausalLM", folder, seed=seed, instead=instead)
    config = json.loads((folder / "config.json").read_text())
    assert (config["head_dim"], config["num_key_value_heads"]) == (head_dim, kv_heads)
    # SGLang derives these from the config of the whole model, of which this is the language model.
    heads = {"v_head_dim": head_dim, "swa_head_dim": head_dim, "swa_v_head_dim": head_dim}
    (folder / "config.json").write_text(json.dumps(config | heads | {"swa_num_key_value_heads": kv_heads}))


def write_with_a_part_of(part: str, other: Path, rest: Path, folder: Path) -> Path:
    """`rest`, with the tensors of these names as `other` has them."""
    folder.mkdir()
    for file in rest.iterdir():
        (folder / file.name).symlink_to(file)
    weights = load_file(rest / "model.safetensors")
    weights |= {n: t for n, t in load_file(other / "model.safetensors").items() if fnmatchcase(n, part)}
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
