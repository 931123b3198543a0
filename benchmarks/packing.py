"""What packing is worth: density of the packer, and seconds of the training phase.

*Density*: tokens per token of the bins, window-greedy beside next-fit and first-fit decreasing
(which sees all items at once), on drawn length distributions and on a data set if one is given.

*Training phase*: `DPPOTrainer` on prepared rollouts, pruning off: the host's padded path, packed
rows that share no prompt, and packed rows as they are, in turn; seconds as the trainer's clock
counts them. Bounds: computed tokens of the padded path / real tokens, and real tokens / tokens when
every prompt is computed once.

    python benchmarks/packing.py --json benchmarks/results/packing.json
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback

import dppo
from dppo.cli.origin import origin
from dppo.tasks import load_builtin_model, load_builtin_tokenizer, sorting_dataset
from dppo.trl import DPPOConfig, DPPOTrainer

CAPACITY, WINDOWS = 1024, (16, 64, 256)
GROUP, MICRO_BATCH, ACCUMULATION = 8, 64, 2
CASES = {
    "much padding": (8, 56, 0.38),
    "some padding": (8, 56, 0.75),
    "prompts four times as long": (96, 24, 0.9),
}
"""Prompt tokens, longest completion, and mean completion as a share of it."""


def main() -> None:
    """Run both parts and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6, help="of each turn")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--parquet", type=Path, help="data set with texts, for the density part")
    parser.add_argument("--columns", nargs="+", default=["question", "answer"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    result = {
        "density": {name: density(lengths) for name, lengths in distributions(args).items()},
        "training": [training(case, args) for case in CASES],
        "command": f"python benchmarks/packing.py --turns {args.turns} --steps {args.steps}",
        "threads": torch.get_num_threads(),
        "seeds": [42],
        **origin(),
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def distributions(args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Lengths to pack, by name."""
    rng = np.random.default_rng(0)
    found = {
        "uniform 1-512": rng.integers(1, 513, 10_000),
        "lognormal, median 150": np.clip(rng.lognormal(5, 0.8, 10_000), 1, CAPACITY).astype(int),
        "eight of each length": np.repeat(rng.integers(20, 700, 1250), 8),
    }
    if args.parquet:
        import pyarrow.parquet  # only where a data set is given

        table = pyarrow.parquet.read_table(args.parquet, columns=args.columns).to_pylist()
        # Four characters are about one token.
        texts = ["".join(str(row[column]) for column in args.columns) for row in table]
        found[args.parquet.stem] = np.clip([len(text) // 4 for text in texts], 1, CAPACITY)
    return found


def density(lengths: np.ndarray) -> dict[str, float]:
    """Tokens per token of the bins, and seconds."""
    values: dict[str, float] = {}
    for window in WINDOWS:
        began = time.perf_counter()
        packing = dppo.pack(lengths, capacity=CAPACITY, window=window)
        values[f"window {window}, seconds"] = time.perf_counter() - began
        values[f"window {window}"] = packing.token_density
    total = int(lengths.sum())
    values["next fit"] = total / (next_fit(lengths) * CAPACITY)
    values["first fit decreasing"] = total / (first_fit_decreasing(lengths) * CAPACITY)
    shown = ", ".join(f"{k} {v:.4f}" for k, v in values.items() if "seconds" not in k)
    print(f"density  {len(lengths):,} items: {shown}")
    return values


def next_fit(lengths: np.ndarray) -> int:
    """Bins that next-fit needs."""
    bins, room = 1, CAPACITY
    for length in lengths.tolist():
        if length > room:
            bins, room = bins + 1, CAPACITY
        room -= length
    return bins


def first_fit_decreasing(lengths: np.ndarray) -> int:
    """Bins that first-fit decreasing needs."""
    rooms = np.full(len(lengths), CAPACITY)
    for length in sorted(lengths.tolist(), reverse=True):
        rooms[np.argmax(rooms >= length)] -= length
    return int((rooms < CAPACITY).sum())


def training(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the training phase, padded, packed and with shared prompts."""
    prompts, completions = prepared(*CASES[case])
    seconds: dict[str, list[float]] = {"none": [], "apart": [], "shared": []}
    for _ in range(args.turns):
        for packing, found in seconds.items():
            run = trainer(packing, prompts, completions, args.steps)
            run.train()
            logs = [log for log in run.state.log_history if "loss" in log]
            found += [log["dppo/time/train"] for log in logs[1:]]  # the first warms up
    median = {packing: statistics.median(found) for packing, found in seconds.items()}
    rows = list(zip(map(len, prompts), map(len, completions), strict=True))
    width = max(p for p, _ in rows) + max(c for _, c in rows)
    real = sum(p + c for p, c in rows)
    once = sum(p for p, _ in rows[::GROUP]) + sum(c + 1 for _, c in rows) - len(rows) // GROUP
    result = {
        "padded density": real / (len(rows) * width),
        "packed": {"ratio": median["none"] / median["apart"], "bound": len(rows) * width / real},
        "shared on top": {"ratio": median["apart"] / median["shared"], "bound": real / once},
        "in all": median["none"] / median["shared"],
        "seconds": seconds,
    }
    packed, shared = result["packed"], result["shared on top"]
    print(
        f"{case}, padded density {result['padded density']:.2f}: packed {packed['ratio']:.2f}x, "
        f"{packed['ratio'] / packed['bound']:.2f} of the bound {packed['bound']:.2f}x; shared "
        f"prompts {shared['ratio']:.2f}x on top, {shared['ratio'] / shared['bound']:.2f} of "
        f"{shared['bound']:.2f}x; in all {result['in all']:.2f}x ("
        + ", ".join(f"{name} {value:.3f} s" for name, value in median.items())
        + f", medians of {len(seconds['none'])} steps)",
        flush=True,
    )
    return {"case": case, **result}


def prepared(prompt: int, longest: int, share: float) -> tuple[list[list[int]], list[list[int]]]:
    """A generation of groups whose completions are `share` of the longest on average."""
    rng = np.random.default_rng(1)
    count = MICRO_BATCH * ACCUMULATION
    lengths = np.clip(rng.normal(share * longest, longest / 6, count), 2, longest)
    lengths[:: MICRO_BATCH // 4] = longest
    groups = [rng.integers(3, 13, prompt).tolist() for _ in range(count // GROUP)]
    prompts = [groups[row // GROUP] for row in range(count)]
    return prompts, [[*rng.integers(3, 13, int(n) - 1).tolist(), 1] for n in lengths]


class Apart(TrainerCallback):
    """Completions do not share their prompt."""

    def __init__(self, run: DPPOTrainer) -> None:
        self.run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the trainer has found out what the model can do."""
        assert self.run._form is not None
        self.run._form = dataclasses.replace(self.run._form, shares=False)


def trainer(
    packing: str, prompt_ids: list[list[int]], completions: list[list[int]], steps: int
) -> DPPOTrainer:
    """Pruning off, on a prepared generation."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    config = DPPOConfig(
        tempfile.mkdtemp(),
        completion_keep=1.0,
        packing="none" if packing == "none" else "varlen",
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        num_generations=GROUP,
        max_completion_length=64,
        overlong_prompts="drop",
        max_steps=steps,
        learning_rate=0.0,
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    texts = [sorting_dataset(1, seed=0)[0]["prompt"]] * 64
    run = DPPOTrainer(
        load_builtin_model(),
        reward,
        config,
        Dataset.from_dict({"prompt": texts}),
        processing_class=load_builtin_tokenizer(),
        rollout_func=rollout,
    )
    if packing == "apart":
        run.add_callback(Apart(run))
    return run


if __name__ == "__main__":
    main()
