#!/bin/bash
# Qwen3-8B on GSM8K in verl, as in the paper (arXiv 2603.04135), on one node with 8 GPUs (vLLM, FSDP2).
#   dppo verl data --dataset gsm8k --output-dir data/gsm8k      # once
#   bash configs/verl/qwen3_8b_gsm8k.sh                           # pruned
#   MODE=sync bash configs/verl/qwen3_8b_gsm8k.sh                 # the baseline: verl as it is
# Composed with verl 0.9.1's own configuration in a test; never run by us.
#
# Known of the paper's setting: Qwen3-8B, GSM8K (7,473 prompts), G = 5, 1,024 new tokens, 15 epochs,
# 8 H100. These are verl's stock GRPO example, from which the rest is taken: 1,024 prompts a rollout,
# 256 a mini-batch, learning rate 1e-6, KL coefficient 0.001 in the loss (low-variance estimator),
# clipping at 0.2, no entropy bonus. The paper's rates are not public: those of prune.* are ours; its
# rules are prune.completion_rule=threshold and prune.prompt_rule=threshold.
set -euo pipefail
DATA=${DATA:-data/gsm8k}
MODE=${MODE:-prune_sync}
OUT=${OUT:-runs/qwen3_8b_gsm8k-$MODE}
mkdir -p "$OUT"
export VERL_FILE_LOGGER_PATH="$OUT/metrics.jsonl"
PRUNE=()
if [ "$MODE" = prune_sync ]; then
  PRUNE=(+prune.completion_keep=auto +prune.prompt_keep=0.6)
fi
python -m verl.trainer.main_ppo \
  trainer.v1.trainer_mode="$MODE" "${PRUNE[@]}" \
  algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
  data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
  data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=1024 \
  data.filter_overlong_prompts=True data.truncation=error \
  actor_rollout_ref.model.path=Qwen/Qwen3-8B \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_epochs=1 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.actor.clip_ratio=0.2 actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  reward.custom_reward_function.path=pkg://dppo.verl.rewards \
  trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_epochs=15 \
  trainer.save_freq=20 trainer.test_freq=5 trainer.logger='[console,file]' \
  trainer.project_name=dppo trainer.experiment_name="qwen3_8b_gsm8k-$MODE" \
  trainer.default_local_dir="$OUT" trainer.validation_data_dir="$OUT/validation" \
  hydra.run.dir="$OUT/hydra" "$@"
