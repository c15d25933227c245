"""A tiny run of verl: a Qwen3 with random weights, tokenizer and chat template, a few prompts, a reward, settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_reshard.selftest import text, tiny_model

RESHARD = (
    "actor_rollout_ref.rollout.checkpoint_engine.backend=reshard",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=sglang_reshard.verl",
)
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def save_model(folder: Path, trainer_ranks: int, tp_size: int) -> None:
    """A whole checkpoint with random weights, the same every time."""
    import torch
    from transformers import Qwen3ForCausalLM

    tiny_model.save(folder, trainer_ranks, tp_size)
    for_chats(folder)
    torch.manual_seed(0)
    Qwen3ForCausalLM(tiny_model.config(trainer_ranks, tp_size)).save_pretrained(folder)


def for_chats(folder: Path) -> None:
    """Give the tokenizer what verl expects of any Qwen's: a chat template and a token that ends a turn."""
    settings, tokenizer = folder / "tokenizer_config.json", folder / "tokenizer.json"
    described = json.loads(settings.read_text())
    settings.write_text(json.dumps({**described, "chat_template": CHAT_TEMPLATE, "pad_token": "<end>"}))
    tokens = json.loads(tokenizer.read_text())
    tokens["added_tokens"][-1]["content"] = "<|im_end|>"  # in place of one of those that only fill up
    tokenizer.write_text(json.dumps(tokens))


def save_prompts(file: Path, rows: int) -> None:
    """A parquet as verl reads it: one chat message a row."""
    from pyarrow import Table, parquet

    prompts = [text.PROMPTS[row % len(text.PROMPTS)] for row in range(rows)]
    table = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for prompt in prompts
    ]
    parquet.write_table(Table.from_pylist(table), file)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """The reward, which verl loads from this file: the share of letters in the answer. Any two answers of a random
    model differ in it."""
    return sum(c.isalpha() for c in solution_str) / max(1, len(solution_str))


def tiny_run(folder: Path, ranks: int, tp_size: int, steps: int = 1) -> list[str]:
    """Hydra overrides for GRPO with the model and the prompts in `folder`.

    ranks  "GPUs" that the trainer has; it shares them with rollout engines of `tp_size` ranks
    """
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/prompts.parquet",
        f"data.val_files={folder}/prompts.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=32",
        "data.max_response_length=16",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        # So large that a step that never reached the rollout shows.
        f"{actor}.optim.lr=5e-3",
        f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_micro_batch_size_per_gpu=4",
        f"{rollout}.name=sglang",
        f"{rollout}.tensor_model_parallel_size={tp_size}",
        f"{rollout}.n=2",
        f"{rollout}.ignore_eos=True",
        f"{rollout}.max_model_len={tiny_model.CONTEXT_LENGTH}",
        f"+{rollout}.engine_kwargs.sglang.context_length={tiny_model.CONTEXT_LENGTH}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=4",
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={__file__}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.logger=[console,file]",
        f"trainer.n_gpus_per_node={ranks}",
        f"trainer.total_training_steps={steps}",
        f"trainer.total_epochs={steps}",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        f"+ray_kwargs.ray_init.num_gpus={ranks}",
        "+ray_kwargs.ray_init.include_dashboard=False",
        # Else Ray takes a third of the host's memory for itself.
        f"+ray_kwargs.ray_init.object_store_memory={256 * 2**20}",
    ]
