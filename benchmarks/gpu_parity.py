"""Whether packed passes are those of single rows on this device, by the attention that is there.

The trainer's own check (`dppo.trl.self_check`), and the parameters after one step of training with
and without packing, from the same rollouts.

    python benchmarks/gpu_parity.py FOLDER --json parity.json
"""

import argparse
import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from gpu_model import odd
from transformers import AutoModelForCausalLM, AutoTokenizer

from dppo.trl import DPPOConfig, DPPOTrainer

LEARNING_RATE = 1e-4


def attentions() -> list[str]:
    flash = torch.cuda.is_available() and find_spec("flash_attn") is not None
    return (["flash_attention_2"] if flash else []) + ["sdpa", "eager"]


def trained(folder: Path, attention: str, packing: str, tokens: int) -> tuple[Any, Any, dict]:
    """A trainer after one step of SGD, and its parameters."""
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if attention == "flash_attention_2" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    with tempfile.TemporaryDirectory() as out:
        config = DPPOConfig(
            out,
            packing=packing,
            completion_keep=0.5,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_generations=8,
            max_completion_length=tokens,
            max_steps=1,
            logging_steps=1,
            optim="sgd",
            learning_rate=LEARNING_RATE,
            max_grad_norm=0.0,
            gradient_checkpointing=False,
            bf16=False,
            tf32=False if on_gpu else None,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            seed=0,
        )
        trainer = DPPOTrainer(
            model,
            odd,
            config,
            load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train"),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        )
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        trainer.train()
    moved = {n: (p.detach() - before[n]).float() for n, p in model.named_parameters()}
    logged = next(log for log in trainer.state.log_history if "loss" in log)
    return trainer._form, moved, logged


def compared(folder: Path, attention: str, tokens: int) -> dict[str, Any]:
    form, packed, log = trained(folder, attention, "varlen", tokens)
    _, padded, _ = trained(folder, attention, "bucket", tokens)
    off = sum(float(((packed[n] - padded[n]) ** 2).sum()) for n in padded) ** 0.5
    length = sum(float((padded[n] ** 2).sum()) for n in padded) ** 0.5
    return {
        "attention": attention,
        "dtype": "bfloat16" if attention == "flash_attention_2" else "float32",
        "packed": form is not None,
        "form": None if form is None else str(form),
        "update_difference": off / length if length else None,
        "density": log.get("dppo/tokens/density"),
        "density_padded": log.get("dppo/tokens/density_padded"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="written by gpu_model.py")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for attention in attentions():
        try:
            found.append(compared(args.folder, attention, args.tokens))
        except Exception as error:  # an attention that this build lacks; the others still tell
            found.append({"attention": attention, "error": f"{type(error).__name__}: {error}"})
        print(json.dumps(found[-1]), flush=True)
    if args.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        content = {"device": device, "torch": torch.__version__, "found": found}
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
