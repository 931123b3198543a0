"""Random configurations in several processes: none may hang, and ranks must end alike.

Each launch is one process group that runs ten configurations of batch, accumulation, generation,
passes, rate, loss and packing, three steps each, one after the other.

    python scripts/random_ranks.py                 # 20 launches of two processes
    python scripts/random_ranks.py --launches 2 --processes 3 --seed 1
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "luspo", "sapo", "cispo", "vespo")


def configuration(rng: np.random.Generator, processes: int) -> dict[str, Any]:
    """One that TRL accepts."""

    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    accumulation = one_of(1, 2, 3)
    passes = one_of(1, 2, 3, 4, accumulation)
    rows = processes * one_of(1, 2, 3, 4)
    groups = [g for g in (2, 3, 4, 6) if rows * passes % g == 0]
    if not groups:
        return configuration(rng, processes)
    return {
        "batch": rows,
        "num_generations": one_of(*groups),
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": passes,
        "num_iterations": one_of(1, 1, 2),
        "completion_keep": one_of(0.05, 0.2, 0.5, 0.9, 1.0, "auto"),
        "completion_rule": one_of("proportional", "proportional", "threshold", "inert"),
        "sampling_design": one_of("systematic", "poisson"),
        "loss_type": one_of(*LOSSES),
        "packing": one_of("none", "auto", "bucket", "varlen"),
        "max_steps": 3,
        "logging_steps": 1,
        "evaluates": bool(rng.random() < 0.2),
    }


def main() -> int:
    """Run the launches; 1 if one failed."""
    from tests.trl.processes import launch  # needs the path above

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--launches", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--each", type=int, default=10, help="configurations in a launch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=300, help="seconds for a launch")
    args = parser.parse_args()
    failures, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.launches):
            rng = np.random.default_rng([args.seed, number])
            cases = [configuration(rng, args.processes) for _ in range(args.each)]
            ranks = launch(Path(folder) / f"{number}", args.processes, cases, limit=args.limit)
            for place, case in enumerate(cases):
                found = [of_rank[place] for of_rank in ranks]
                same = all((f["parameters"] == found[0]["parameters"]).all() for f in found)
                errors = [f["error"] for f in found if f["error"]]
                if errors or not same:
                    failures += 1
                    print(f"launch {number}: {case}: {errors or 'ranks ended differently'}")
            print(
                f"launch {number + 1}/{args.launches}: {args.each} configurations, "
                f"{failures} failures so far, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
