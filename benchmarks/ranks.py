"""How even the ranks are with rows where they were rolled out, and with rows moved; no processes.

A generation of W ranks x 64 rows in groups of 8 is decided on as in training (keep 0.5, advantages
of 0 and 1 rewards), and its survivors are laid out twice. *Imbalance*: tokens of the rank that has
most, over the mean, less 1. *Wasted*: share of the token capacity that ranks wait for the last one,
micro-step by micro-step, since all run in step: 1 - mean / max. Seconds: of one decision, both
phases of the layout included; every rank spends them.

    python benchmarks/ranks.py --json benchmarks/results/ranks.json
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import dppo
from dppo.audit import load_recording
from dppo.cli.origin import origin
from dppo.packing.layout import Price
from dppo.packing.spread import Room, loads
from dppo.trl.decision import Rows, decide
from dppo.trl.schedule import Geometry
from dppo.trl.signal import signal

RANKS, ROWS, GROUP, LONGEST = (8, 64, 1024), 64, 8, 1024
REPEATS = 5


def distributions(recording: Path | None) -> dict[str, Any]:
    """Functions (rng, count) -> completion tokens."""
    found: dict[str, Any] = {
        "even": lambda rng, n: rng.integers(200, 300, n),
        "lognormal, median 150": lambda rng, n: np.clip(rng.lognormal(5, 0.8, n), 1, LONGEST),
        "one in ten to the limit": lambda rng, n: np.where(
            rng.random(n) < 0.1, LONGEST, rng.integers(20, 300, n)
        ),
    }
    if recording is not None:
        lengths = load_recording(recording).lengths_PG.ravel()
        found[f"recorded, mean {lengths.mean():.0f}"] = lambda rng, n: rng.choice(lengths, n)
    return found


def main() -> None:
    """Measure every number of ranks and distribution."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--recording", type=Path, help="of dppo train --record-rollouts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print(f"{'ranks':>5} {'lengths':<26} {'layout':<7} {'imbalance':>20} {'wasted':>18} {'s':>6}")
    for ranks in RANKS:
        for name, draw in distributions(args.recording).items():
            for packed in (False, True):
                row = {
                    "ranks": ranks,
                    "lengths": name,
                    "packed": packed,
                    **measured(ranks, draw, packed=packed),
                }
                rows.append(row)
                print(
                    "{ranks:>5} {lengths:<26} {0:<7} {1:>9.1%} -> {2:>7.1%} {3:>7.1%} -> {4:>7.1%} "
                    "{seconds:>6.2f}".format(
                        "packed" if packed else "rows",
                        *(row[k][w] for k in ("imbalance", "wasted") for w in ("before", "after")),
                        **row,
                    ),
                    flush=True,
                )
    if args.json:
        args.json.write_text(
            json.dumps(
                {"rows": rows, "command": "python benchmarks/ranks.py", "seeds": [0], **origin()},
                indent=2,
            )
            + "\n"
        )


def measured(ranks: int, draw: Any, *, packed: bool) -> dict[str, Any]:
    """Means over a few generations."""
    found: dict[str, list[float]] = {}
    for repeat in range(REPEATS if ranks < 1024 else 1):
        rng = np.random.default_rng([repeat, ranks])
        for moves in (False, True):
            one = generation(rng, ranks, draw, packed=packed, moves=moves)
            for key, value in one.items():
                found.setdefault(f"{key}/{'after' if moves else 'before'}", []).append(value)
    mean = {key: float(np.mean(values)) for key, values in found.items()}
    return {
        key: {when: mean[f"{key}/{when}"] for when in ("before", "after")}
        for key in ("imbalance", "wasted")
    } | {"seconds": mean["seconds/after"]}


def generation(
    rng: np.random.Generator, ranks: int, draw: Any, *, packed: bool, moves: bool
) -> dict[str, float]:
    """Decide on one."""
    size = ranks * ROWS
    completion_N = np.asarray(draw(rng, size)).astype(np.int64)
    prompt_N = np.repeat(rng.integers(50, 200, size // GROUP), GROUP)
    chance_P = rng.beta(0.5, 0.5, size // GROUP)
    rewards = (rng.random(size) < np.repeat(chance_P, GROUP)).astype(np.float32)
    group_N = np.arange(size) // GROUP
    width = int(completion_N.max() + prompt_N.max())
    room = Room(16 * width, Price(4096), True, prompt_N, completion_N, group_N)
    told = signal(
        rewards[:, None],
        np.ones(1, np.float32),
        group=GROUP,
        scale="group",
        aggregation="sum_then_normalize",
    )
    surprisal = rng.lognormal(0, 0.5, size)
    began = time.perf_counter()
    decision = decide(
        dppo.Pruner(dppo.PruneConfig(completion_keep=0.5), seed=0),
        told,
        Rows(prompt_N, completion_N, completion_N, surprisal),
        geometry=Geometry(ranks, 16, 4, 1, 4),
        rank=0,
        generation=0,
        window_left=4,
        loss_type="dapo",
        other_terms=False,
        sort=True,
        room=room if packed else None,
        moves=moves,
    )
    seconds = time.perf_counter() - began
    shared = group_N if packed and moves else None
    steps = [b for b in decision.training if b is not None]
    most = sum(int(loads([b], prompt_N, completion_N, shared).max()) for b in steps)
    load_W = loads(steps, prompt_N, completion_N, shared)
    return {
        "imbalance": float(load_W.max() / load_W.mean()) - 1,
        "wasted": 1 - float(load_W.mean()) / most,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
