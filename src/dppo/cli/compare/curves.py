"""The runs of a comparison, and when they reach a target.

The target is 90 % of the baseline's improvement on the mean held-out curve over its seeds, made
monotone (isotonic regression). Steps to it are interpolated between evaluations; seconds and tokens
follow from the steps. Intervals are percentiles of a bootstrap over seeds, both methods alike.

Suffixes: `_E` evaluations, `_T` optimizer steps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SHARE = 0.9
RESAMPLES = 2000
TOTALS = ("seconds", "cpu_seconds", "tokens_generated", "tokens_trained")


@dataclass(frozen=True, eq=False)
class Run:
    """One method, one seed.

    Attributes:
        eval_step_E: Steps at which it was evaluated, 0 first.
        eval_reward_E: Mean held-out rewards.
        spent: Wall and CPU seconds and completion tokens, each cumulated, shape (T + 1,).
        means: Mean over the steps of whatever was logged.
        final: Mean held-out reward at the end.
    """

    eval_step_E: Floats
    eval_reward_E: Floats
    spent: dict[str, Floats]
    means: dict[str, float]
    final: float

    @classmethod
    def read(cls, folder: Path) -> Run:
        """From the files of a run that has ended."""
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        evaluated = [r for r in records if "eval_reward" in r]
        steps = [r for r in records if "step_seconds" in r]
        names = ("step_seconds", "step_cpu_seconds", "tokens_generated", "tokens_trained")
        spent = {
            total: np.concatenate(([0.0], np.cumsum([r[name] for r in steps])))
            for total, name in zip(TOTALS, names, strict=True)
        }
        keys = {key for r in steps for key, value in r.items() if isinstance(value, int | float)}
        return cls(
            np.array([r["step"] for r in evaluated], np.float64),
            np.array([r["eval_reward"] for r in evaluated], np.float64),
            spent,
            {key: float(np.mean([r[key] for r in steps if key in r])) for key in sorted(keys)},
            float(summary["reward_after"]),
        )


def isotonic(values_E: Floats) -> Floats:
    """The non-decreasing sequence nearest in squares: neighbours that fall are pooled.

    Example:
        >>> isotonic(np.array([0.0, 3.0, 1.0, 4.0])).tolist()
        [0.0, 2.0, 2.0, 4.0]
    """
    blocks: list[tuple[float, int]] = []
    for value in values_E.tolist():
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, m), (b, n) = blocks[-2:]
            blocks[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


def target_of(baseline: Sequence[Run]) -> float | None:
    """Held-out reward at which 90 % of the baseline's improvement is made; None without any."""
    curve = isotonic(np.mean([run.eval_reward_E for run in baseline], axis=0))
    gained = float(curve[-1] - curve[0])
    return float(curve[0]) + SHARE * gained if gained > 0 else None


def steps_to(target: float | None, runs: Sequence[Run]) -> float | None:
    """Steps until the mean curve of the runs first has the target; None if it never does."""
    steps, curve = runs[0].eval_step_E, isotonic(np.mean([r.eval_reward_E for r in runs], axis=0))
    if target is None or curve[-1] < target:
        return None
    place = int(np.argmax(curve >= target))
    if place == 0 or curve[place] == target:
        return float(steps[place])
    return float(np.interp(target, curve[place - 1 : place + 1], steps[place - 1 : place + 1]))


def spent_at(step: float, runs: Sequence[Run]) -> dict[str, float]:
    """Mean seconds and tokens of the runs until a step, which may be between two."""
    return {
        name: float(
            np.mean([np.interp(step, np.arange(len(r.spent[name])), r.spent[name]) for r in runs])
        )
        for name in TOTALS
    }


def compare_to_target(mine: Sequence[Run], theirs: Sequence[Run]) -> dict[str, Any]:
    """Steps, seconds and tokens to the target, and how many times less than the baseline's."""
    target = target_of(theirs)
    found: dict[str, Any] = {"target": target, "steps": steps_to(target, mine)}
    baseline = steps_to(target, theirs)
    if found["steps"] is None or baseline is None:
        return found
    spent, other = spent_at(found["steps"], mine), spent_at(baseline, theirs)
    found |= spent
    found["fewer"] = {n: other[n] / spent[n] for n in TOTALS if spent[n]}
    found["fewer_steps"] = baseline / found["steps"] if found["steps"] else None
    found["interval"] = times_faster(mine, theirs, theirs)
    return found


def times_faster(
    first: Sequence[Run], second: Sequence[Run], baseline: Sequence[Run]
) -> dict[str, Any]:
    """How many times sooner, in seconds, `first` has the baseline's target than `second`.

    Returns:
        The ratio, None if either never has it, and its 95 % interval by bootstrap over seeds; a
        resample in which `first` never arrives counts as 0, one in which only `second` does not as
        infinite. No interval from fewer than three seeds.
    """
    ratio = _ratio(first, second, baseline)
    if len(baseline) < 3 or first is second:
        return {"ratio": ratio or None, "low": None, "high": None}
    rng, ratios = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        drawn = rng.integers(0, len(baseline), len(baseline)).tolist()
        ratios.append(_ratio(*([of[i] for i in drawn] for of in (first, second, baseline))))
    low, high = np.quantile(ratios, [0.025, 0.975], method="nearest").tolist()
    finite = ratio if 0 < ratio < np.inf else None
    return {"ratio": finite, "low": low, "high": high if np.isfinite(high) else None}


def _ratio(first: Sequence[Run], second: Sequence[Run], baseline: Sequence[Run]) -> float:
    target = target_of(baseline)
    a, b = steps_to(target, first), steps_to(target, second)
    if a is None:
        return 0.0
    if b is None:
        return float("inf")
    mine = spent_at(a, first)["seconds"]
    return spent_at(b, second)["seconds"] / mine if mine else float("inf")
