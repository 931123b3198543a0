#!/bin/bash
# verl's own trainer on two CPU ranks, pruned: the built-in task, 5 steps, about 3 minutes.
#   bash configs/verl/smoke_cpu.sh                                   # pruned
#   MODE=sync bash configs/verl/smoke_cpu.sh                         # verl as it is, beside it
#   bash configs/verl/smoke_cpu.sh trainer.total_training_steps=10   # any of verl's options
# PYTHON is of the environment that has verl; OUT is where everything goes.
set -euo pipefail
PYTHON=${PYTHON:-python}
MODE=${MODE:-prune_sync}
OUT=${OUT:-runs/verl-$MODE}
mkdir -p "$OUT"
export VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=dppo.verl.cpu
export VERL_FILE_LOGGER_PATH="$OUT/metrics.jsonl"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HYDRA_FULL_ERROR=1
export RAY_DISABLE_DOCKER_CPU_WARNING=1 RAY_USAGE_STATS_ENABLED=0 GLOO_SOCKET_IFNAME=lo
"$PYTHON" -m dppo.cli verl data --output-dir "$OUT/data" --num-prompts "${PROMPTS:-64}" --eval-prompts 64
PRUNE=()
if [ "$MODE" = prune_sync ]; then
  PRUNE=(+prune.completion_keep=0.5 +prune.prompt_keep=0.75)
fi
"$PYTHON" -W ignore -m verl.trainer.main_ppo \
  trainer.v1.trainer_mode="$MODE" "${PRUNE[@]}" \
  ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.num_gpus=2 \
  +ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init.object_store_memory=500000000 \
  trainer.device=cpu trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.logger='[console,file]' \
  trainer.val_before_train=True trainer.test_freq=5 trainer.validation_data_dir="$OUT/validation" \
  trainer.total_epochs=100 trainer.total_training_steps=5 trainer.save_freq=-1 \
  trainer.default_local_dir="$OUT/checkpoints" trainer.resume_mode=disable \
  algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
  data.train_files="$OUT/data/train.parquet" data.val_files="$OUT/data/test.parquet" \
  data.train_batch_size=32 data.max_prompt_length=32 data.max_response_length=20 \
  data.dataloader_num_workers=0 data.filter_overlong_prompts=False data.seed=1 \
  actor_rollout_ref.model.path="$OUT/data/model" \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  +actor_rollout_ref.model.override_config.attn_implementation=sdpa \
  actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024 \
  actor_rollout_ref.actor.optim.lr=3e-4 actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.fsdp_config.use_torch_compile=False \
  actor_rollout_ref.actor.use_torch_compile=False \
  +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32 \
  actor_rollout_ref.actor.fsdp_config.model_dtype=fp32 \
  actor_rollout_ref.rollout.name=hf_cpu actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.agent.num_workers=1 \
  actor_rollout_ref.rollout.n_gpus_per_node=2 actor_rollout_ref.rollout.free_cache_engine=False \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  reward.num_workers=1 reward.custom_reward_function.path=pkg://dppo.verl.rewards \
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1 hydra.run.dir="$OUT/hydra" "$@"
if grep -q dppo/tokens "$OUT/metrics.jsonl"; then  # something was pruned
  "$PYTHON" -m dppo.cli verl summary "$OUT"
fi
