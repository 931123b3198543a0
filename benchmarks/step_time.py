"""Seconds per optimizer step and per phase, without us, packed, and pruned, in one run.

Every variant is a trainer of its own on the built-in task. They take turns, one optimizer step
each, so that a noisy machine hits all alike, and ratios are taken step by step. The learning rate
is 0 and the random state is set before each step, so all variants roll out the same completions.

The first variant is the host's own path, nothing pruned or packed. The bound is what pruning could
reach at best, with phases as measured in the variant that is packed and not pruned:
t_rollout + t_score + t_train * kept cost.

    python benchmarks/step_time.py --steps 20 --json benchmarks/results/step_time.json
"""

import argparse
import json
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from dppo.cli.origin import origin
from dppo.tasks import (
    load_builtin_model,
    load_builtin_tokenizer,
    sorting_dataset,
    sorting_reward,
)
from dppo.trl import DPPOConfig, DPPOTrainer

PHASES = ("rollout", "score", "prune", "train")


class Baton(TrainerCallback):
    """Lets one trainer run one optimizer step, then the next trainer."""

    def __init__(self, turn: threading.Semaphore, following: threading.Semaphore) -> None:
        self.turn, self.following = turn, following

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.turn.acquire()
        torch.manual_seed(1000 + state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.following.release()  # once more at the very end, when nobody waits


def make_trainer(keep: float, packing: str, args: argparse.Namespace, folder: str) -> DPPOTrainer:
    config = DPPOConfig(
        folder,
        completion_keep=keep,
        packing=packing,
        completion_rule=args.rule,
        loss_type=args.loss_type,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.accumulation,
        num_generations=args.group,
        max_completion_length=20,
        max_steps=args.steps + args.warmup,
        learning_rate=0.0,
        beta=args.beta,
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
        seed=args.seed,
        dataloader_pin_memory=False,
    )
    return DPPOTrainer(
        load_builtin_model(),
        sorting_reward,
        config,
        sorting_dataset(4096, seed=args.seed),
        processing_class=load_builtin_tokenizer(),
    )


def run(trainers: list[DPPOTrainer]) -> None:
    turns = [threading.Semaphore(0) for _ in trainers]
    threads = []
    for i, trainer in enumerate(trainers):
        trainer.add_callback(Baton(turns[i], turns[(i + 1) % len(trainers)]))
        trainer.callback_handler.callbacks.sort(key=lambda c: not isinstance(c, Baton))
        threads.append(threading.Thread(target=trainer.train))
    for thread in threads:
        thread.start()
    turns[0].release()
    for thread in threads:
        thread.join()


def steps_of(trainer: DPPOTrainer, warmup: int) -> list[dict[str, float]]:
    logs = [log for log in trainer.state.log_history if "dppo/time/train" in log][warmup:]
    rows = []
    for log in logs:
        row = {phase: log[f"dppo/time/{phase}"] for phase in PHASES}
        row["step"] = sum(row.values())
        row["kept_cost"] = log.get("dppo/cost/keep", 1.0)
        row["density"] = log.get("dppo/tokens/density", float("nan"))
        rows.append(row)
    return rows


def summarize(
    off: list[dict[str, float]], packed: list[dict[str, float]], on: list[dict[str, float]]
) -> dict[str, float]:
    bounds = [
        a["rollout"] + a["score"] + a["train"] * b["kept_cost"]
        for a, b in zip(packed, on, strict=True)
    ]
    median = {name: statistics.median(row[name] for row in on) for name in (*PHASES, "step")}
    return {
        **median,
        "kept_cost": statistics.median(row["kept_cost"] for row in on),
        "speedup": statistics.median(a["step"] / b["step"] for a, b in zip(off, on, strict=True)),
        "train_speedup": statistics.median(
            a["train"] / b["train"] for a, b in zip(off, on, strict=True)
        ),
        "bound": statistics.median(bounds),
        "bound_speedup": statistics.median(a["step"] / b for a, b in zip(off, bounds, strict=True)),
        "step_over_bound": statistics.median(
            b["step"] / bound for b, bound in zip(on, bounds, strict=True)
        ),
    }


def table(rows: list[dict[str, float]]) -> str:
    names = (
        "keep",
        "packed",
        *PHASES,
        "step",
        "kept_cost",
        "train_speedup",
        "speedup",
        "bound_speedup",
    )
    lines = ["  ".join(f"{name:>13}" for name in names)]
    lines += ["  ".join(f"{row[name]:13.4f}" for name in names) for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each variant")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--loss-type", default="dapo")
    parser.add_argument("--rule", default="proportional")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()

    variants = [(1.0, "none"), (1.0, "auto"), *((keep, "auto") for keep in args.keep)]
    with tempfile.TemporaryDirectory() as folder:
        trainers = [make_trainer(*variant, args, folder) for variant in variants]
        run(trainers)
    measured = [steps_of(trainer, args.warmup) for trainer in trainers]
    rows = [
        {"keep": keep, "packed": float(packing != "none"), **summarize(*measured[:2], on)}
        for (keep, packing), on in zip(variants, measured, strict=True)
    ]
    print("median seconds per optimizer step; ratios are medians over steps of off / on")
    print(table(rows))
    if args.json:
        result = {
            "command": f"python benchmarks/step_time.py --steps {args.steps}",
            "options": {**vars(args), "json": None},
            **origin(),
            "seeds": [args.seed],
            "variants": rows,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
