"""What a run reports at its end: as a dictionary for summary.json and as text."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from dppo.cli.progress import duration

if TYPE_CHECKING:
    from dppo.cli.evaluate import Evaluation

_PACKAGES = ("dppo", "torch", "transformers", "trl", "accelerate", "datasets", "numpy")
_PHASES = ("rollout", "score", "prune", "train")


@dataclass(frozen=True)
class Gain:
    """How much faster a step gets, by Amdahl's law.

    Attributes:
        speedup: Time before over time after.
        ceiling: The same if the prunable part took no time at all.
    """

    speedup: float
    ceiling: float


def pruning_gain(fixed_seconds: float, prunable_seconds: float, *, kept: float) -> Gain:
    """The gain of doing only a share of the prunable part of a step.

    Args:
        fixed_seconds: What pruning does not touch; for completion pruning, the rollout.
        prunable_seconds: What it does, measured without pruning.
        kept: The share of the prunable seconds that remains.

    Returns:
        The gain; its ceiling is infinite if nothing is fixed.

    Example:
        >>> gain = pruning_gain(7, 3, kept=0.5)
        >>> round(gain.speedup, 2), round(gain.ceiling, 2)
        (1.18, 1.43)
    """
    total, left = fixed_seconds + prunable_seconds, fixed_seconds + kept * prunable_seconds
    return Gain(
        total / left if left else float("inf"),
        total / fixed_seconds if fixed_seconds else float("inf"),
    )


def make_summary(
    totals: Mapping[str, Any],
    *,
    before: Evaluation | None,
    after: Evaluation | None,
    steps: int,
    wall_seconds: float,
    interrupted: bool,
    resumed_from: int | None,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Collects the content of summary.json.

    Args:
        totals: `DPPOTrainer.totals()`.
        before: The evaluation before training, if there was one.
        after: The one after.
        steps: Optimizer steps done, those before the checkpoint included.
        wall_seconds: Of the whole run, evaluations included.
        interrupted: Whether the user stopped it.
        resumed_from: The step of the checkpoint it started from; totals and seconds begin there.
        config: Options that differ from their defaults.

    Returns:
        The summary.
    """
    return {
        "reward_before": before.mean if before else None,
        "reward_before_standard_error": before.standard_error if before else None,
        "reward_after": after.mean if after else None,
        "reward_after_standard_error": after.standard_error if after else None,
        "eval_prompts": before.count + before.unscored if before else 0,
        "steps": steps,
        "resumed_from_step": resumed_from,
        "interrupted": interrupted,
        "wall_seconds": wall_seconds,
        **totals,
        "config": dict(config),
        "versions": package_versions(),
    }


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The summary as a reader wants it.

    Args:
        summary: From `make_summary`.

    Returns:
        The lines to print.
    """
    lines = [_reward_line(summary), *_time_lines(summary), *_token_lines(summary)]
    share = summary.get("effective_sample_size")
    if share is not None:
        lines.append(f"ESS      {share:.2f} of the kept completions, mean over generations")
    if summary["resumed_from_step"] is not None:
        lines.append(f"resumed  from step {summary['resumed_from_step']}; counted since then")
    if summary["interrupted"]:
        lines.append(f"interrupted after {summary['steps']} steps")
    return lines


def _reward_line(summary: Mapping[str, Any]) -> str:
    if not summary["eval_prompts"]:
        return "reward   not evaluated"
    parts = [
        f"{when} {summary[key]:.3f} ± {summary[f'{key}_standard_error']:.3f}"
        for when, key in (("before", "reward_before"), ("after", "reward_after"))
        if summary[key] is not None
    ]
    return (
        f"reward   {', '.join(parts)} (mean ± standard error, {summary['eval_prompts']} held-out "
        "prompts, one completion each)"
    )


def _time_lines(summary: Mapping[str, Any]) -> list[str]:
    seconds = {name: float(summary["seconds"].get(name, 0.0)) for name in _PHASES}
    total = sum(seconds.values())
    lines = [f"wall     {duration(summary['wall_seconds'])}, {summary['steps']} steps"]
    if total == 0:
        return lines
    parts = [f"{name} {value:.1f} s ({value / total:.0%})" for name, value in seconds.items()]
    lines.append(f"time     {', '.join(parts)}")
    other = max(summary["wall_seconds"] - total, 0.0)
    lines.append(f"         and {other:.1f} s of set-up and evaluations")
    fixed = total - seconds["train"]
    ceiling = pruning_gain(fixed, seconds["train"], kept=1.0).ceiling
    lines.append(
        f"ceiling  all but train took f = {fixed / total:.2f} of this time, so more completion "
        f"pruning could make this run at most 1/f = {ceiling:.2f}x as fast. To measure a gain, "
        "compare wall-clock seconds with a run at --completion-keep 1.0"
    )
    return lines


def _token_lines(summary: Mapping[str, Any]) -> list[str]:
    generated = summary["completion_tokens_generated"]
    trained = summary["completion_tokens_trained"]
    if not generated:
        return ["tokens   none generated"]
    lines = [
        f"tokens   {generated:,} completion tokens generated, {trained:,} trained "
        f"({trained / generated:.1%})"
    ]
    candidates, drawn = summary["prompts_candidates"], summary["prompts_rolled_out"]
    if candidates > drawn:
        share = f"{drawn / candidates:.1%}"
        lines.insert(0, f"prompts  {drawn:,} rolled out of {candidates:,} candidates ({share})")
    skipped = {k: v for k, v in summary["completion_tokens_skipped"].items() if v}
    if skipped:
        parts = [f"{reason.replace('_', ' ')} {count:,}" for reason, count in skipped.items()]
        lines.append(f"         skipped: {', '.join(parts)}")
    return lines


def package_versions() -> dict[str, str]:
    """Of this package and those that matter, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
