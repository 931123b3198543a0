"""Columns made of logged metrics: shares of completions, the rate that was set, smooth curves.

Axes: `_S` the steps that have a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dppo.config import parse_keep
from dppo.errors import ConfigurationError
from dppo.pruner import DROP_REASONS

Floats = NDArray[np.float64]
_SINGLE = ("all_right", "all_wrong")
_RATED = ("proportional", "uniform")
"""Rules that go by `completion_keep`."""


def derived_columns(columns: Mapping[str, Floats], summary: Mapping[str, Any]) -> dict[str, Floats]:
    """What the figures draw and no record holds as such.

    Args:
        columns: Metrics by name.
        summary: Content of summary.json.

    Returns:
        `dppo/tokens/generated` and `trained` if missing; `reward_shown`; `rate`;
        `count/kept` and `count/REASON`, completions of a generation;
        `share/all_right`, `share/signal`, `share/other`, `share/all_wrong`, of all completions,
        or `share/signal` and `share/no_signal` where reasons are not logged. Those that the
        metrics suffice for.
    """
    # `dppo compare` counts them of all its methods, TRL's own trainer among them.
    found = {
        f"dppo/tokens/{kind}": columns[f"tokens_{kind}"]
        for kind in ("generated", "trained")
        if f"dppo/tokens/{kind}" not in columns and f"tokens_{kind}" in columns
    }
    pruned_prompts = "dppo/prompts/keep" in columns and "dppo/reward/ht" in columns
    reward_S = columns.get("dppo/reward/ht" if pruned_prompts else "reward")
    if reward_S is not None:
        found["reward_shown"] = reward_S
    rate_S = _rate(columns, summary)
    if rate_S is not None:
        found["rate"] = rate_S
    return {**found, **_completions(columns), **_signal(columns)}


def _rate(columns: Mapping[str, Floats], summary: Mapping[str, Any]) -> Floats | None:
    """The rate of each generation, or the one that was set, where the rule goes by a rate."""
    if "dppo/auto/rate" in columns:
        return columns["dppo/auto/rate"]
    config = summary.get("config")
    if not isinstance(config, Mapping) or "dppo/cost/keep" not in columns:
        return None
    try:
        mode, rate = parse_keep("completion_keep", config.get("completion_keep"))
    except ConfigurationError:  # another tool's record
        return None
    if mode == "auto" or config.get("completion_rule", "proportional") not in _RATED:
        return None
    return np.where(np.isfinite(columns["dppo/cost/keep"]), rate, np.nan)


def _completions(columns: Mapping[str, Floats]) -> dict[str, Floats]:
    """Completions of a generation by what became of them; they add up to all completions."""
    reasons = {reason: columns.get(f"dppo/dropped/{reason}") for reason in DROP_REASONS}
    known = {reason: count_S for reason, count_S in reasons.items() if count_S is not None}
    all_S = _all_completions(columns, sum(known.values())) if known else None
    if all_S is None:
        return {}
    kept_S = all_S - sum(known.values())
    return {"count/kept": kept_S, **{f"count/{name}": count for name, count in known.items()}}


def _all_completions(columns: Mapping[str, Floats], dropped_S: Any) -> Floats | None:
    """Completions of a generation: by what was dropped, or by their mean length if nothing was."""
    keep_S = columns.get("dppo/completions/keep")
    if keep_S is None:
        return None
    all_S = np.full(keep_S.shape, np.nan)
    np.divide(dropped_S, 1 - keep_S, out=all_S, where=(keep_S < 1) & (dropped_S > 0))
    tokens_S, length_S = (
        columns.get("dppo/tokens/generated"),
        columns.get("completions/mean_length"),
    )
    if tokens_S is not None and length_S is not None:
        whole_S = (dropped_S == 0) & (length_S > 0)
        np.divide(tokens_S, length_S, out=all_S, where=whole_S)
    return all_S


def _signal(columns: Mapping[str, Floats]) -> dict[str, Floats]:
    """Shares of the completions whose group has a signal, is all right, or all wrong."""
    counts = _completions(columns)
    live_S = columns.get("dppo/completions/live")
    if live_S is None or not all(f"count/{name}" in counts for name in _SINGLE):
        dead_S = columns.get("frac_reward_zero_std")
        if dead_S is None:
            return {}
        return {"share/signal": 1 - dead_S, "share/no_signal": dead_S}
    all_S = np.sum(list(counts.values()), axis=0)
    right_S, wrong_S = (counts[f"count/{name}"] / all_S for name in _SINGLE)
    other_S = np.clip(1 - right_S - wrong_S - live_S, 0, None)  # -1e-17 where there is none
    return {
        "share/all_right": right_S,
        "share/signal": np.where(np.isfinite(right_S), live_S, np.nan),
        "share/other": other_S,
        "share/all_wrong": wrong_S,
    }


def moving_average(values: Floats, window: int) -> Floats:
    """The mean of each value and those before it, `window` in all; fewer at the beginning.

    Example:
        >>> moving_average(np.array([1.0, 3.0, 5.0]), 2).tolist()
        [1.0, 2.0, 4.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - window, 0)
    return (sums[last] - sums[first]) / (last - first)


def window_of(count: int) -> int:
    """How many records an average runs over: a tenth of them, at most 50.

    Example:
        >>> window_of(6), window_of(60), window_of(10_000)
        (1, 6, 50)
    """
    return min(max(round(count / 10), 1), 50)
