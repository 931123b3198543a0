"""Time `Pruner.select_completions` on 1e4, 1e5 and 1e6 rows.

python benchmarks/selection_time.py --json select.json
"""

import argparse
import json
import platform
import sys
import time

import numpy as np

import dppo

GROUP = 8


def make_batch(rows):
    """Arguments of a generation of `rows` completions; a third of the groups is constant."""
    rng = np.random.default_rng(0)
    shape = (rows // GROUP, GROUP)
    rewards = (rng.random(shape) < rng.choice([0.0, 0.3, 0.7], size=(shape[0], 1))).astype(float)
    return {
        "rewards_PG": rewards,
        "surprisal_PG": rng.uniform(0.01, 0.3, size=shape),
        "lengths_PG": rng.integers(20, 1024, size=shape),
        "prompt_lengths_P": rng.integers(30, 300, size=shape[0]),
    }


def measure(rows, design, repeats):
    """Best time of `repeats` calls, in seconds."""
    pruner = dppo.Pruner(dppo.PruneConfig(sampling_design=design), seed=0)
    batch = make_batch(rows)
    seconds = []
    for step in range(repeats):
        start = time.perf_counter()
        pruner.select_completions(**batch, step=step)
        seconds.append(time.perf_counter() - start)
    best = min(seconds)
    return {"rows": rows, "design": design, "seconds": best, "rows_per_second": rows / best}


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="batch sizes"
    )
    parser.add_argument("--repeats", type=int, default=3, help="calls of which the best counts")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    arguments = parser.parse_args(argv)

    results = []
    print(f"{'rows':>10}  {'design':<10}  {'seconds':>9}  {'rows / s':>12}")
    for rows in arguments.rows:
        for design in ("systematic", "poisson"):
            row = measure(rows, design, arguments.repeats)
            results.append(row)
            print(
                f"{row['rows']:>10,}  {design:<10}  {row['seconds']:>9.4f}"
                f"  {row['rows_per_second']:>12,.0f}",
                flush=True,
            )
    report = {
        "benchmark": "select",
        "group": GROUP,
        "repeats": arguments.repeats,
        "dppo": dppo.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "results": results,
    }
    text = json.dumps(report, indent=2)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
