"""Kill training with `kill -9` at ten seeded moments, resume, and compare with a run left alone.

The run is a 16-step variant of the demo, prompts and completions pruned at fixed rates, a
checkpoint after every step. Five kills hit a run whose generations serve one optimizer step each,
five one whose generations serve two steps twice over (steps_per_generation = 2 * gradient
accumulation, num_iterations = 2), so that most of them fall inside a generation. Every step that
any process has run must have used the prompts, selections and weights of the undisturbed run and
must have left exactly its parameters.

    python scripts/kill_and_resume.py

The last line says whether it holds; the exit code is 0 if so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

STEPS, KILLS, SEED = 16, 5, 0
VARIANTS: dict[str, dict[str, int]] = {
    "one step per generation": {"steps_per_generation": 4, "num_iterations": 1},
    "four steps per generation": {"steps_per_generation": 8, "num_iterations": 2},
}
PROMPTS = 40
"""So few that even four generations make several passes."""


def main() -> int:
    """Run the comparison, or one of its workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--worker", nargs=2, metavar=("VARIANT", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        train(arguments.worker[0], Path(arguments.worker[1]))
        return 0
    began = time.monotonic()
    rng = np.random.default_rng(SEED)
    failures: list[str] = []
    total, done, counted = len(VARIANTS) * KILLS, 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        for variant in VARIANTS:
            whole = Path(scratch) / "whole" / variant
            say(began, f"{variant}: the undisturbed run")
            seconds = run(variant, whole)
            expected = {record["step"]: record for record in records(whole)}
            assert sorted(expected) == list(range(1, STEPS + 1)), sorted(expected)
            for number in range(KILLS):
                folder = Path(scratch) / f"killed {number}" / variant
                after, share = int(rng.integers(1, STEPS - 1)), float(rng.random())
                # Less than a step, however slow the undisturbed run was: it must not finish first.
                delay = share * min(seconds / STEPS, 0.5)
                found = kill(variant, folder, after=after, delay=delay)
                run(variant, folder)
                problems = differences(expected, list(records(folder)))
                counted += sum(1 for _ in records(folder))
                failures += [f"{variant}, kill {number}: {p}" for p in problems]
                done += 1
                left = (time.monotonic() - began) / done * (total - done)
                state = "equal" if not problems else f"DIFFERENT: {problems[0]}"
                where = f"killed after step {found}, {share:.2f} of a step later"
                say(began, f"{done}/{total} {variant}: {where}; {state}; {left:.0f} s left")
    minutes = (time.monotonic() - began) / 60
    for failure in failures:
        print(failure)
    if failures:
        print(f"FAILED: {len(failures)} differences in {total} kills ({minutes:.1f} min)")
        return 1
    print(
        f"PASSED: {total} of {total} kills resumed exactly; prompts, selections, weights and "
        f"parameters equal in all {counted} steps ({minutes:.1f} min)"
    )
    return 0


def train(variant: str, folder: Path) -> None:
    """Train, from the last complete checkpoint in `folder` if there is one."""
    from transformers import TrainerCallback

    from dppo.cli.builtin import BUILTIN_CONFIG
    from dppo.errors import ConfigurationError
    from dppo.tasks import (
        load_builtin_model,
        load_builtin_tokenizer,
        sorting_dataset,
        sorting_reward,
    )
    from dppo.trl import DPPOConfig, DPPOTrainer

    class Record(TrainerCallback):
        """Writes down what a step has used, and what it has left."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            decision = trainer._decision
            parts = [part for choice in decision.choices for part in (choice.kept, choice.weight)]
            record = {
                "step": state.global_step,
                "generation": decision.generation,
                "prompts": digest(decision.window.ids_M, decision.window.ids),
                "prompt probabilities": digest(decision.window.selection.pi),
                "selections and weights": digest(*parts),
                "parameters": digest(*(p.detach().numpy() for p in trainer.model.parameters())),
            }
            with (folder / "records.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(f"step {state.global_step}", flush=True)

    folder.mkdir(parents=True, exist_ok=True)
    shared = {k: v for k, v in BUILTIN_CONFIG.items() if k not in {"max_steps", "output_dir"}}
    options = {
        "per_device_train_batch_size": 16,
        "max_steps": STEPS,
        "prompt_keep": 0.6,
        "completion_keep": 0.5,
        "loss_type": "dr_grpo",
        "num_iterations": VARIANTS[variant]["num_iterations"],
        "steps_per_generation": VARIANTS[variant]["steps_per_generation"],
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 3,
    }
    trainer = DPPOTrainer(
        load_builtin_model(),
        sorting_reward,
        DPPOConfig(str(folder), **{**shared, **options}),
        sorting_dataset(PROMPTS, seed=0),
        processing_class=load_builtin_tokenizer(),
        callbacks=[Record()],
    )
    try:
        trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    except ConfigurationError as error:
        if "no checkpoint" not in str(error):
            raise
        trainer.train()  # killed before the first checkpoint was complete


def digest(*arrays: Any) -> str:
    """Of the bytes of arrays."""
    made = blake2b(digest_size=16)
    for array in arrays:
        made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()


def worker(variant: str, folder: Path) -> subprocess.Popen[str]:
    """Start training in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--worker", variant, str(folder)]
    log = (folder / "log.txt").open("a")
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)


def run(variant: str, folder: Path) -> float:
    """Train to the end; return the seconds from the first step on."""
    process, first = worker(variant, folder), 0.0
    for line in steps(process):
        first = first or time.monotonic()
        del line
    if process.wait() != 0:
        raise SystemExit(f"training failed:\n{(folder / 'log.txt').read_text()[-3000:]}")
    return time.monotonic() - first


def kill(variant: str, folder: Path, *, after: int, delay: float) -> int:
    """Kill training `delay` seconds after a step; return the last step it has told of."""
    process, step = worker(variant, folder), 0
    for step in steps(process):
        if step >= after:
            time.sleep(delay)
            os.kill(process.pid, signal.SIGKILL)
            break
    process.wait()
    return step


def steps(process: subprocess.Popen[str]) -> Iterator[int]:
    """The steps of a worker as they are over."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            yield int(line.split()[1])


def records(folder: Path) -> Iterator[dict[str, Any]]:
    """What the processes in `folder` have written down; a line cut by a kill is left out."""
    for line in (folder / "records.jsonl").read_text().splitlines(keepends=True):
        if line.endswith("}\n"):
            yield json.loads(line)


def differences(expected: dict[int, dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """What differs from the undisturbed run."""
    problems = [
        f"step {record['step']}: {name}"
        for record in found
        for name in record
        if record[name] != expected[record["step"]][name]
    ]
    missing = sorted(expected.keys() - {record["step"] for record in found})
    return problems + ([f"steps {missing} were not run"] if missing else [])


def say(began: float, text: str) -> None:
    """A line of progress."""
    print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
