#!/usr/bin/env bash
# GRPO with trainer and rollout on GPUs of their own: FSDP2 over 32 GPUs (4 nodes) into 64 GPUs (8 nodes), which
# serve eight SGLang replicas of TP=8. Every trainer rank sends its own shards to the ranks that lack them.
# Run it on the head node of a Ray cluster of 12 nodes.
#
#   MODEL=Qwen/Qwen3-32B TRAIN=/data/train.parquet VAL=/data/val.parquet ./disaggregated_32_to_64.sh
#
# Trainer rank 0 listens on Ray's address of its node. Where hosts have several networks, say which one:
#   engine_kwargs.reshard.interface=10.0.0.1 below, and GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME in the environment.
set -euo pipefail

exec python -m verl.trainer.main_ppo \
  actor_rollout_ref.rollout.checkpoint_engine.backend=reshard \
  actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=sglang_reshard.verl \
  +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.reshard.transport=auto \
  +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.reshard.timeout=600 \
  algorithm.adv_estimator=grpo \
  data.train_files="${TRAIN:?a parquet file of prompts}" \
  data.val_files="${VAL:?a parquet file of prompts}" \
  data.train_batch_size=512 \
  data.max_prompt_length=1024 \
  data.max_response_length=8192 \
  actor_rollout_ref.hybrid_engine=False \
  actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-32B}" \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.name=sglang \
  actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
  actor_rollout_ref.rollout.nnodes=8 \
  actor_rollout_ref.rollout.n_gpus_per_node=8 \
  actor_rollout_ref.rollout.n=16 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  trainer.v1.trainer_mode=separate_async \
  trainer.v1.separate_async.parameter_sync_step=4 \
  trainer.nnodes=4 \
  trainer.n_gpus_per_node=8 \
  trainer.logger='[console]' \
  trainer.project_name=sglang_reshard \
  trainer.experiment_name=disaggregated_32_to_64 \
  trainer.total_epochs=1 \
  "$@"
