"""Seconds of the training phase in one process and in two, one thread each: padded, and pruned.

The built-in model on prepared completions of skewed length, whose live groups lie unevenly over the
ranks that roll them out. One process and two train the same batch, in turns; the phase's seconds
are those of the slowest rank, as the trainer's clock counts them. What the second process brings to
the host's padded path it should bring to the pruned and packed one, too.

    python benchmarks/processes.py --json benchmarks/results/processes.json
"""

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from dppo.cli.origin import origin
from dppo.tasks import load_builtin_model, load_builtin_tokenizer, sorting_dataset
from dppo.trl import DPPOConfig, DPPOTrainer

ROWS, ACCUMULATION, GROUP = 64, 2, 8
METHODS: dict[str, dict[str, Any]] = {
    "padded": {"completion_keep": 1.0, "packing": "none"},
    "packed": {"completion_keep": 1.0, "packing": "varlen"},
    "pruned": {"completion_keep": 0.5, "packing": "varlen"},
}


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that follow from their place; the first half is longer."""
    first = trainer.accelerator.process_index * len(prompts)
    found: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
    for place in range(first, first + len(prompts)):
        rng = np.random.default_rng(place)
        longest = 56 if place < ROWS * ACCUMULATION // 2 else 20
        count = int(np.clip(rng.normal(0.7, 0.2) * longest, 2, longest))
        group = np.random.default_rng([1, place // GROUP])
        found["prompt_ids"].append(group.integers(3, 13, 12).tolist())
        found["completion_ids"].append([*rng.integers(3, 13, count).tolist(), 1])
    return found


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    """Differs within groups, and follows from the completion."""
    return [float(sum(map(ord, text)) % 3 == 0) for text in completions]


def run(  # noqa: PLR0917 - spawned
    rank: int, world: int, port: int, method: str, steps: int, folder: str
) -> None:
    """A rank's part of a run."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ACCELERATE_USE_CPU="true",
        TRL_EXPERIMENTAL_SILENCE="1",
        OMP_NUM_THREADS="1",  # else accelerate sets as many threads as there are cores
    )
    torch.set_num_threads(1)
    config = DPPOConfig(
        folder,
        per_device_train_batch_size=ROWS // world,
        gradient_accumulation_steps=ACCUMULATION,
        num_generations=GROUP,
        max_completion_length=64,
        overlong_prompts="drop",
        max_steps=steps,
        learning_rate=0.0,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
        **METHODS[method],
    )
    trainer = DPPOTrainer(
        load_builtin_model(),
        reward,
        config,
        sorting_dataset(256, seed=0),
        processing_class=load_builtin_tokenizer(),
        rollout_func=rollout,
    )
    assert trainer.accelerator.num_processes == world
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    found = {
        "seconds": [log["dppo/time/train"] for log in logs[1:]],  # the first warms up
        "imbalance": [log.get("dppo/ranks/imbalance", 0.0) for log in logs],
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    if world > 1:
        torch.distributed.barrier()
        time.sleep(1)
    os._exit(0)  # gloo may wait for its peers when the interpreter ends


def timed(world: int, method: str, steps: int) -> dict[str, Any]:
    """Seconds of the steps, of the slowest rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [
            context.Process(target=run, args=(rank, world, port, method, steps, folder))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(600)
            assert process.exitcode == 0, f"a rank of {method} in {world} processes failed"
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]
    return {
        "seconds": np.max([f["seconds"] for f in found], axis=0).tolist(),
        "imbalance": found[0]["imbalance"],
    }


def main() -> None:
    """Run all in turns and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8, help="of each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seconds: dict[str, dict[str, list[float]]] = {m: {"1": [], "2": []} for m in METHODS}
    imbalance: dict[str, float] = {}
    for _ in range(args.turns):
        for method in METHODS:
            for world in (1, 2):
                found = timed(world, method, args.steps)
                seconds[method][str(world)] += found["seconds"]
                imbalance[method] = max(found["imbalance"])
    median = {m: {w: statistics.median(s) for w, s in by.items()} for m, by in seconds.items()}
    gain = {m: by["1"] / by["2"] for m, by in median.items()}
    for method, by in median.items():
        print(
            f"{method}: {by['1']:.3f} s in one process, {by['2']:.3f} s in two: "
            f"{gain[method]:.2f}x, {gain[method] / gain['padded']:.2f} of what the padded path "
            f"gains; largest imbalance {imbalance[method]:.1%}"
        )
    if args.json:
        result = {
            "gain": gain,
            "median": median,
            "imbalance": imbalance,
            "seconds": seconds,
            "command": f"python benchmarks/processes.py --turns {args.turns} --steps {args.steps}",
            "seeds": [42],
            **origin(),
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
