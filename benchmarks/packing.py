"""What packing is worth: density of the packer, and seconds of the training phase.

*Density*: tokens per token of the bins, window-greedy beside next-fit and first-fit decreasing
(which sees all items at once), on drawn length distributions and on a data set if one is given.

*Training phase*: `DPPOTrainer` on prepared completions, pruning off, the host's padded path and
`packing="varlen"` taking turns; seconds as the trainer's clock counts them. The bound is what is
padded: computed tokens of the padded path / real tokens.

    python benchmarks/packing.py --json benchmarks/results/packing.json
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

import dppo
from dppo.tasks import load_builtin_model, load_builtin_tokenizer, sorting_dataset
from dppo.trl import DPPOConfig, DPPOTrainer

CAPACITY, WINDOWS = 1024, (16, 64, 256)
GROUP, MICRO_BATCH, ACCUMULATION = 8, 64, 2


def main() -> None:
    """Run both parts and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6, help="of each turn")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--longest", type=int, default=48, help="completion tokens")
    parser.add_argument("--parquet", type=Path, help="data set with texts, for the density part")
    parser.add_argument("--columns", nargs="+", default=["question", "answer"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    result = {
        "density": {name: density(lengths) for name, lengths in distributions(args).items()},
        "training": [training(share, args) for share in (0.5, 0.8)],
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            **{name: version(name) for name in ("torch", "transformers", "trl")},
        },
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


def training(share: float, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the training phase, padded and packed, at about `share` real tokens."""
    completions = prepared(share, args.longest)
    seconds: dict[str, list[float]] = {"none": [], "varlen": []}
    for _ in range(args.turns):
        for packing, found in seconds.items():
            run = trainer(packing, completions, args.steps)
            run.train()
            logs = [log for log in run.state.log_history if "loss" in log]
            found += [log["dppo/time/train"] for log in logs[1:]]  # the first warms up
    prompt = len(load_builtin_tokenizer()(sorting_dataset(1, seed=0)[0]["prompt"])["input_ids"])
    padded = len(completions) * (prompt + max(map(len, completions)))
    real = sum(prompt + len(ids) for ids in completions)
    ratio = statistics.median(seconds["none"]) / statistics.median(seconds["varlen"])
    bound = padded / real
    print(
        f"training density {1 / bound:.2f} padded: {ratio:.2f}x as fast packed, bound "
        f"{bound:.2f}x, "
        f"{ratio / bound:.2f} of it (median of {len(seconds['none'])} steps: "
        f"{statistics.median(seconds['none']):.3f} s, {statistics.median(seconds['varlen']):.3f} s)"
    )
    return {"padded density": 1 / bound, "ratio": ratio, "bound": bound, "seconds": seconds}


def prepared(share: float, longest: int) -> list[list[int]]:
    """Completions of a generation whose mean length is `share` of the longest."""
    rng = np.random.default_rng(1)
    lengths = np.clip(
        rng.normal(share * longest, longest / 6, MICRO_BATCH * ACCUMULATION), 2, longest
    )
    lengths[:: MICRO_BATCH // 4] = longest
    return [[*rng.integers(3, 13, int(n) - 1).tolist(), 1] for n in lengths]


def trainer(packing: str, completions: list[list[int]], steps: int) -> DPPOTrainer:
    """Pruning off, on prepared completions."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(text=prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    config = DPPOConfig(
        tempfile.mkdtemp(),
        completion_keep=1.0,
        packing=packing,
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
    prompts = [sorting_dataset(1, seed=0)[0]["prompt"]] * 64
    return DPPOTrainer(
        load_builtin_model(),
        reward,
        config,
        Dataset.from_dict({"prompt": prompts}),
        processing_class=load_builtin_tokenizer(),
        rollout_func=rollout,
    )


if __name__ == "__main__":
    main()
