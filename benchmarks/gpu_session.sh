#!/usr/bin/env bash
# Packing parity and step times on a GPU, in about 8 minutes; writes JSON into the output folder.
#   benchmarks/gpu_session.sh OUT          a random-weight Qwen3 of 0.6 B, one large GPU
#   benchmarks/gpu_session.sh OUT toy      the same script at toy size, on a CPU
# Set PYTHON to an interpreter that has the package; a CUDA build of torch, and vLLM or flash
# attention if they are there to be tried. Nothing is downloaded.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
size=${2:-0.6b}
cd "$(dirname "$0")"
python=${PYTHON:-python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TOKENIZERS_PARALLELISM=false PYTHONPATH=.

if [ "$size" = toy ]; then
  mean=12 length=12 tokens=32 batch=8 accumulation=2 steps=2 limit=600
else
  mean=300 length=150 tokens=512 batch=32 accumulation=4 steps=6 limit=180
fi

say() { printf '== %s (%s s)\n' "$1" "$SECONDS"; }

say "model and prompts"
"$python" gpu_model.py "$work/model" --size "$size" --mean-length "$mean" --prompt-length "$length"
"$python" gpu_model.py "$work/small" --size toy --mean-length 40 --prompt-length 30

say "parity"
timeout "$limit" "$python" gpu_parity.py "$work/small" --json "$out/gpu_parity.json" ||
  echo "parity did not end"

say "step times"
timeout "$((limit + 120))" "$python" -m dppo.cli compare \
  --methods grpo packing keep-50=dppo,completion_keep=0.5 keep-25=dppo,completion_keep=0.25 \
  --model "$work/model" --dataset "$work/model/prompts.jsonl" --reward gpu_model:odd \
  --seeds 1 --max-steps "$steps" --eval-prompts 2 --eval-every "$steps" --final-samples 1 \
  --num-generations 8 --per-device-train-batch-size "$batch" \
  --gradient-accumulation-steps "$accumulation" --max-completion-length "$tokens" \
  --learning-rate 0 --output-dir "$work/compare" || echo "step times did not end"
[ -f "$work/compare/comparison.json" ] && cp "$work/compare/comparison.json" "$out/gpu_step.json"
say "done; results in $out"
