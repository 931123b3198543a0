"""What the runs of a comparison say: time to a target, reward at equal steps, seconds per phase.

Methods are compared with the baseline on the seeds that both have (`curves`).

* reward at the end: paired differences by seed, with the interval of Student's t;
* bound of a step: t_rollout + t_score + t_train * kept cost / packing gain, all of the baseline,
  the gain being that of the method "packing" in training time;
* predicted: the efficiency 1 / ((1 + v) cost) of pruning a packed step (`predicted_efficiency`)
  times what packing alone makes a step faster.

Suffix: `_S` seeds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dppo.cli.compare.curves import Floats, Run, compare_to_target, spent_at, times_faster
from dppo.cli.compare.methods import BASELINE, REFERENCE
from dppo.estimator.diagnostics import predicted_efficiency

PHASES = ("rollout", "score", "prune", "train")
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom (any table)."""


def analyse(
    runs: Mapping[str, Mapping[int, Run]], *, packed: Collection[str] = ()
) -> dict[str, Any]:
    """Everything a comparison reports.

    Args:
        runs: By method and seed; methods without any are left out. The baseline has some.
        packed: Methods whose rows are packed.

    Returns:
        JSON-ready: by method what `_row` says.
    """
    step = {name: _mean(of, "step_seconds") or 0.0 for name, of in runs.items() if of}
    return {name: _row(of, runs, step, packed=name in packed) for name, of in runs.items() if of}


def _row(
    of: Mapping[int, Run],
    runs: Mapping[str, Mapping[int, Run]],
    step: Mapping[str, float],
    *,
    packed: bool,
) -> dict[str, Any]:
    base, own = runs[BASELINE], next(name for name, other in runs.items() if other is of)
    seeds = sorted(of.keys() & base.keys())
    row: dict[str, Any] = {
        "seeds": sorted(of),
        "packed": packed,
        "step_seconds": step[own],
        "step_cpu_seconds": _mean(of, "step_cpu_seconds"),
        "phases": {phase: _mean(of, f"dppo/time/{phase}") for phase in PHASES},
        "clip_factor": _mean(of, "dppo/clip/factor"),
        "kept_cost": _mean(of, "dppo/cost/keep"),
        "rate": _mean(of, "dppo/auto/rate"),
        "variance": _mean(of, "dppo/variance/inflation"),
        "density": _mean(of, "dppo/tokens/density"),
        "final_reward": float(np.mean([run.final for run in of.values()])),
        "final_reward_by_seed": {str(seed): run.final for seed, run in sorted(of.items())},
        "step_speedup": step[BASELINE] / step[own],
        "curve": _curve(list(of.values())),
    }
    row |= bound_and_prediction(row, runs, step)
    if not seeds:
        return row
    mine, theirs = [of[s] for s in seeds], [base[s] for s in seeds]
    difference = np.array([a.final - b.final for a, b in zip(mine, theirs, strict=True)])
    row["reward_difference"] = paired(difference)
    row["to_target"] = compare_to_target(mine, theirs)
    ours = runs.get(REFERENCE, {})
    common = [s for s in seeds if s in ours]
    if common and own not in {REFERENCE, BASELINE}:
        dppo, others, base_of = ([by[s] for s in common] for by in (ours, of, base))
        row["dppo_sooner"] = times_faster(dppo, others, base_of)
    return row


def paired(difference_S: Floats) -> dict[str, Any]:
    """Mean of differences, and its 95 % interval by Student's t; none from one seed.

    Example:
        >>> paired(np.array([0.0, 0.02]))["mean"]
        0.01
    """
    count, mean = len(difference_S), float(difference_S.mean())
    if count < 2:
        return {"mean": mean, "low": None, "high": None, "seeds": count}
    quantile = STUDENT[min(count - 2, len(STUDENT) - 1)]
    half = quantile * float(difference_S.std(ddof=1)) / count**0.5
    return {"mean": mean, "low": mean - half, "high": mean + half, "seeds": count}


def bound_and_prediction(
    row: Mapping[str, Any],
    runs: Mapping[str, Mapping[int, Run]],
    step: Mapping[str, float],
) -> dict[str, Any]:
    """How fast a step and the way to the target could be, for an unbiased method.

    Of packed methods only if "packing" was compared, too; others have no gain of that kind.
    """
    packed = runs.get("packing")
    if row["kept_cost"] is None or row["variance"] is None:
        return {}
    theirs = {phase: _mean(runs[BASELINE], f"dppo/time/{phase}") or 0.0 for phase in PHASES}
    alone, gain = theirs, 1.0
    if row["packed"]:
        if not packed:
            return {}
        alone = {phase: _mean(packed, f"dppo/time/{phase}") or 0.0 for phase in PHASES}
        gain = step[BASELINE] / step["packing"]
    bound = theirs["rollout"] + theirs["score"] + alone["train"] * row["kept_cost"]
    fixed = alone["rollout"] + alone["score"]
    if fixed + alone["train"] == 0:
        return {}  # no seconds are known
    efficiency = predicted_efficiency(
        row["variance"], row["kept_cost"], rollout_share=fixed / (fixed + alone["train"])
    )
    return {
        "bound_seconds": bound,
        "over_bound": row["step_seconds"] / bound,
        "predicted": efficiency * gain,
        "rollout_share": fixed / (fixed + alone["train"]),
    }


def _curve(runs: Sequence[Run]) -> dict[str, list[float]]:
    steps = runs[0].eval_step_E
    seconds = [spent_at(step, runs)["seconds"] for step in steps.tolist()]
    reward_SE = np.array([run.eval_reward_E for run in runs])
    return {
        "step": steps.tolist(),
        "seconds": seconds,
        "reward": reward_SE.mean(axis=0).tolist(),
        "low": reward_SE.min(axis=0).tolist(),
        "high": reward_SE.max(axis=0).tolist(),
    }


def _mean(runs: Mapping[int, Run], name: str) -> float | None:
    found = [run.means[name] for run in runs.values() if name in run.means]
    return float(np.mean(found)) if found else None
