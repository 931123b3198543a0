"""The table of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dppo.cli.compare.methods import BASELINE

HEADINGS = (
    *("method", "seeds", "s/step", "cpu", "rollout", "train", "step x", "bound"),
    *("kept", "clip", "to target", "time x", "95 % of it", "predicted", "tokens x"),
    *("reward", "difference, 95 %", "dppo sooner"),
)


def table(rows: Mapping[str, Any]) -> list[list[str]]:
    """Cells, the headings first.

    Args:
        rows: From `analysis.analyse`.
    """
    return [list(HEADINGS), *(_cells(name, row) for name, row in rows.items())]


def lines(rows: Mapping[str, Any]) -> list[str]:
    """The table as text, and what its columns say."""
    cells = table(rows)
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADINGS))]
    found = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    return [
        *found,
        "",
        "s/step, cpu: seconds of an optimizer step; rollout, train: of its phases; step x: times "
        f"faster than {BASELINE}; bound: seconds over the least that pruning and packing allow",
        "to target: steps until 90 % of the baseline's improvement, on the mean held-out curve, "
        "made monotone; time x: times less wall-clock than the baseline needs, with an interval by "
        "bootstrap over seeds; predicted: by variance and cost; tokens x: fewer trained",
        "reward: held out, at the end; difference: to the baseline, paired by seed, Student's t; "
        "dppo sooner: how many times sooner dppo has the target, on the seeds that both have",
    ]


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    goal, phases = row.get("to_target", {}), row["phases"]
    interval = goal.get("interval", {})
    fewer = goal.get("fewer", {})
    difference = row.get("reward_difference")
    itself = name == BASELINE
    return [
        name,
        str(len(row["seeds"])),
        _number(row["step_seconds"], 3),
        _number(row["step_cpu_seconds"], 3),
        _number(phases["rollout"], 3),
        _number(phases["train"], 3),
        _number(row["step_speedup"]),
        _number(row.get("over_bound")),
        _number(row["kept_cost"]),
        _number(row["clip_factor"]),
        _number(goal.get("steps"), 1) if goal.get("steps") is not None else "never",
        _number(fewer.get("seconds")),
        "" if itself else _range(interval),
        _number(row.get("predicted")),
        _number(fewer.get("tokens_trained")),
        _number(row["final_reward"], 3),
        "" if itself or difference is None else _difference(difference),
        _sooner(row.get("dppo_sooner")),
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _range(interval: Mapping[str, Any]) -> str:
    if interval.get("low") is None:
        return ""
    return f"{interval['low']:.2f}-{interval['high']:.2f}"


def _sooner(found: Mapping[str, Any] | None) -> str:
    if found is None or found["ratio"] is None:
        return ""
    limits = _range(found) if found["high"] is not None else ""
    return f"{found['ratio']:.2f}" + (f" ({limits})" if limits else "")


def _difference(difference: Mapping[str, Any]) -> str:
    mean, low, high = (difference[key] for key in ("mean", "low", "high"))
    return f"{mean:+.3f}" + ("" if low is None else f" ({low:+.3f}, {high:+.3f})")
