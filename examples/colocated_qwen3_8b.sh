#!/usr/bin/env bash
# GRPO on Qwen3-8B, trainer and rollout on the same 8 GPUs: FSDP2 over 8 ranks, four SGLang replicas of TP=2.
# The two lines with `checkpoint_engine` turn resharding on; without them this is a stock verl run.
#
#   MODEL=Qwen/Qwen3-8B TRAIN=~/data/gsm8k/train.parquet VAL=~/data/gsm8k/test.parquet ./colocated_qwen3_8b.sh
set -euo pipefail

exec python -m verl.trainer.main_ppo \
  actor_rollout_ref.rollout.checkpoint_engine.backend=reshard \
  actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=sglang_reshard.verl \
  algorithm.adv_estimator=grpo \
  data.train_files="${TRAIN:?a parquet file of prompts}" \
  data.val_files="${VAL:?a parquet file of prompts}" \
  data.train_batch_size=256 \
  data.max_prompt_length=1024 \
  data.max_response_length=4096 \
  actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-8B}" \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.name=sglang \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  trainer.v1.trainer_mode=sync \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node=8 \
  trainer.logger='[console]' \
  trainer.project_name=sglang_reshard \
  trainer.experiment_name=qwen3_8b_colocated \
  trainer.total_epochs=1 \
  "$@"
