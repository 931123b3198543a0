"""The reward, over seconds and over steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dppo.report import texts
from dppo.report.curves import Line, draw_lines
from dppo.report.derived import Floats
from dppo.report.picture import Picture, averaged, curves_in_words
from dppo.report.read import RunData

_SERIES = (("reward_shown", "training"), ("eval_reward", "held-out"))
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
_HOST = "For {runs} the seconds are the host's step_time, which leaves the optimizer out."


def reward_over_seconds(runs: Sequence[RunData], window: int) -> Picture:
    """Reward against the wall-clock seconds of optimizer steps."""
    clocks = [run.clock.wall_S for run in runs]
    longest = max((float(wall_S[-1]) for wall_S in clocks if wall_S is not None), default=0.0)
    unit, name = next((u for u in _UNITS if longest >= 5 * u[0]), _UNITS[-1])
    places = [None if wall_S is None else wall_S / unit for wall_S in clocks]
    hosts = [run.name for run in runs if "step_time" in run.clock.source]
    caption = [texts.REWARD_SECONDS, _HOST.format(runs=", ".join(hosts)) if hosts else ""]
    return _picture(
        runs,
        places,
        key="reward-seconds",
        title="Reward over wall-clock time",
        xlabel=f"{name} of optimizer steps",
        needs="reward and step_seconds, dppo/time/* or step_time",
        caption=caption,
        window=window,
    )


def reward_over_steps(runs: Sequence[RunData], window: int) -> Picture:
    """Reward against optimizer steps."""
    estimated = [run.name for run in runs if run.has("dppo/prompts/keep")]
    caption = [texts.REWARD_STEPS]
    if estimated:
        caption.append(f"For {', '.join(estimated)}: dppo/reward/ht, the estimate for all prompts.")
    return _picture(
        runs,
        [run.steps_S for run in runs],
        key="reward-steps",
        title="Reward over steps",
        xlabel="optimizer step",
        needs="reward",
        caption=caption,
        window=window,
    )


def _picture(
    runs: Sequence[RunData],
    places: Sequence[Floats | None],
    *,
    key: str,
    title: str,
    xlabel: str,
    needs: str,
    caption: Sequence[str],
    window: int,
) -> Picture:
    names, series = [run.name for run in runs], [name for _, name in _SERIES]
    lines = _lines(runs, places)
    held_out = "Diamonds: held-out prompts." if any(line.points for line in lines) else ""
    png = b""
    if lines:
        labels = (xlabel, "mean reward")
        png = draw_lines(
            lines, runs=names, series=series, labels=labels, window=window, floor=False
        )
    words = curves_in_words(lines, names, series, window=window)
    return Picture(
        key,
        title,
        " ".join(part for part in (*caption, averaged(window), held_out) if part),
        f"Curves over {xlabel}: {words}",
        png,
        needs,
        tuple(name for i, name in enumerate(names) if i not in {line.run for line in lines}),
    )


def _lines(runs: Sequence[RunData], places: Sequence[Floats | None]) -> list[Line]:
    lines = []
    for index, (run, places_S) in enumerate(zip(runs, places, strict=True)):
        for series, (column, _) in enumerate(_SERIES):
            if places_S is None or not run.has(column):
                continue
            there_S = np.isfinite(run.columns[column])
            x, y = places_S[there_S], run.columns[column][there_S]
            lines.append(Line(index, series, x, y, points=column == "eval_reward"))
    return lines
