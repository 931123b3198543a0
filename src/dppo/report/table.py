"""The headline numbers, a row for each and a column for each run. What is unknown stays empty."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dppo.pruner import DROP_REASONS
from dppo.report.derived import moving_average, window_of
from dppo.report.read import RunData
from dppo.report.records import number
from dppo.report.seconds import PHASES

_SKIPPED = "skipped: "
Cell = Callable[[RunData], str | None]


def headline(runs: Sequence[RunData]) -> tuple[list[tuple[str, list[str | None]]], list[str]]:
    """The table.

    Args:
        runs: One column each.

    Returns:
        Rows, a label and a cell for each run; and the labels of rows that no run has. Reasons for
        which nothing was skipped have no row.
    """
    rows = [(label, [cell(run) for run in runs]) for label, cell in _rows()]
    reasons = [row for row in rows if row[0].startswith(_SKIPPED)]
    idle = [label for label, cells in reasons if set(cells) <= {None, "0"}]
    rows = [row for row in rows if row[0] not in idle]
    return [row for row in rows if any(row[1])], [label for label, cells in rows if not any(cells)]


def _rows() -> list[tuple[str, Cell]]:
    return [
        ("state", _state),
        ("held-out reward before", lambda run: _reward(run, "reward_before")),
        ("held-out reward after", lambda run: _reward(run, "reward_after")),
        ("held-out prompts", lambda run: _count(run.summary.get("eval_prompts") or None)),
        ("training reward at the end", _last_reward),
        ("steps", _steps),
        ("wall (whole run)", lambda run: _seconds(run.summary.get("wall_seconds"))),
        ("wall (optimizer steps)", _wall),
        ("processor (optimizer steps)", lambda run: _seconds(run.clock.cpu)),
        *((f"time in {phase}", _phase(phase)) for phase in PHASES),
        ("prompts rolled out", _prompts),
        ("tokens generated", lambda run: _count(run.summary.get("completion_tokens_generated"))),
        ("tokens trained", _trained),
        *((f"{_SKIPPED}{name.replace('_', ' ')}", _skipped(name)) for name in DROP_REASONS),
        ("effective sample size", lambda run: _share(run.summary.get("effective_sample_size"))),
    ]


def _state(run: RunData) -> str | None:
    if not run.summary:
        return f"no end yet, step {_steps(run)}" if len(run.steps_S) else "no records yet"
    stopped = run.summary.get("interrupted")
    text = f"interrupted at step {_steps(run)}" if stopped else "finished"
    resumed = number(run.summary.get("resumed_from_step"))
    return text if resumed is None else f"{text}; resumed at {resumed:.0f}, totals since"


def _steps(run: RunData) -> str | None:
    done = number(run.summary.get("steps"))
    if done is None:
        done = float(run.steps_S[-1]) if len(run.steps_S) else None
    if done is None:
        return None
    goal = run.max_steps
    return f"{done:,.0f} of {goal:,}" if goal and goal > done else f"{done:,.0f}"


def _reward(run: RunData, key: str) -> str | None:
    mean = number(run.summary.get(key))
    error = number(run.summary.get(f"{key}_standard_error"))
    if mean is None:
        return None
    return f"{mean:.3f}" if error is None else f"{mean:.3f} ± {error:.3f}"


def _last_reward(run: RunData) -> str | None:
    _, rewards = run.column("reward_shown")
    if not len(rewards):
        return None
    window = window_of(len(rewards))
    return f"{moving_average(rewards, window)[-1]:.3f}"


def _wall(run: RunData) -> str | None:
    wall_S = run.clock.wall_S
    return _seconds(None if wall_S is None or not len(wall_S) else float(wall_S[-1]))


def _phase(name: str) -> Cell:
    def cell(run: RunData) -> str | None:
        seconds = _mapping(run.summary.get("seconds")) or run.clock.phases
        known = {phase: number(seconds.get(phase)) for phase in PHASES}
        total, mine = sum(value or 0.0 for value in known.values()), known[name]
        return f"{_seconds(mine)} ({mine / total:.0%})" if mine is not None and total else None

    return cell


def _prompts(run: RunData) -> str | None:
    drawn = _count(run.summary.get("prompts_rolled_out"))
    candidates = _count(run.summary.get("prompts_candidates"))
    if drawn is None or candidates is None or candidates == "0":
        return None
    return drawn if drawn == candidates else f"{drawn} of {candidates} candidates"


def _trained(run: RunData) -> str | None:
    generated = number(run.summary.get("completion_tokens_generated"))
    trained = number(run.summary.get("completion_tokens_trained"))
    if trained is None or not generated:
        return _count(trained)
    return f"{trained:,.0f} ({trained / generated:.1%})"


def _skipped(reason: str) -> Cell:
    def cell(run: RunData) -> str | None:
        return _count(_mapping(run.summary.get("completion_tokens_skipped")).get(reason))

    return cell


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: Any) -> str | None:
    count = number(value)
    return None if count is None else f"{count:,.0f}"


def _share(value: Any) -> str | None:
    share = number(value)
    return None if share is None else f"{share:.2f}"


def _seconds(value: Any) -> str | None:
    seconds = number(value)
    if seconds is None:
        return None
    if seconds < 100:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
