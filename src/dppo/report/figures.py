"""The pictures of a page: which runs can be drawn, and what each picture shows, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dppo.report import texts
from dppo.report.bars import Bars, draw_groups, draw_stacks
from dppo.report.curves import Line, draw_lines
from dppo.report.derived import window_of
from dppo.report.difficulty import BINS
from dppo.report.picture import Picture, averaged, curves_in_words, needed
from dppo.report.read import RunData
from dppo.report.rewards import reward_over_seconds, reward_over_steps
from dppo.report.texts import Curves, Stacked

_BARS = 60
"""At most; more would be thinner than a pixel on a phone."""


def make_pictures(runs: Sequence[RunData]) -> list[Picture]:
    """Draws all there is.

    Args:
        runs: The runs, in the order of their colours.

    Returns:
        The pictures in the order of the page, also those that no run suffices for.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    window = window_of(max((run.column("reward_shown")[0].size for run in runs), default=0))
    pictures = [reward_over_seconds(runs, window), reward_over_steps(runs, window)]
    for spec in texts.FIGURES:
        one = _stacked(runs, spec) if isinstance(spec, Stacked) else _curves(runs, spec, window)
        pictures.append(one)
    return [*pictures, _prompts(runs)]


def _curves(runs: Sequence[RunData], spec: Curves, window: int) -> Picture:
    names = [run.name for run in runs]
    window = window if spec.smooth else 1
    lines = [
        Line(index, series, *run.column(column))
        for index, run in enumerate(runs)
        for series, (column, _) in enumerate(spec.series)
        if run.has(column)
    ]
    series = [name for _, name in spec.series]
    png = b""
    if lines:
        labels = ("optimizer step", spec.ylabel)
        png = draw_lines(
            lines, runs=names, series=series, labels=labels, window=window, floor=spec.floor
        )
    return Picture(
        spec.key,
        spec.title,
        f"{spec.caption} {averaged(window)}".strip(),
        f"Curves over optimizer steps: {curves_in_words(lines, names, series, window=window)}",
        png,
        " or ".join(column for column, _ in spec.series if column != "rate"),
        tuple(name for i, name in enumerate(names) if i not in {line.run for line in lines}),
    )


def _stacked(runs: Sequence[RunData], spec: Stacked) -> Picture:
    found = [(run, _binned(run, spec)) for run in runs]
    stacks = [bars for _, bars in found if bars is not None]
    there = {part for bars in stacks for part, values in bars.parts.items() if values.any()}
    stacks = [
        replace(bars, parts={p: v for p, v in bars.parts.items() if p in there}) for bars in stacks
    ]
    colours = {name: colour for _, name, colour in spec.parts if name in there}
    means = [
        f"{bars.name}: " + ", ".join(f"{p} {v.mean():.3g}" for p, v in bars.parts.items())
        for bars in stacks
    ]
    return Picture(
        spec.key,
        spec.title,
        spec.caption,
        f"Stacked bars over optimizer steps, means: {'; '.join(means)}",
        draw_stacks(stacks, colours=colours, ylabel=spec.ylabel) if stacks else b"",
        " or ".join(dict.fromkeys(needed(column) for column, _, _ in spec.parts)),
        tuple(run.name for run, bars in found if bars is None),
    )


def _binned(run: RunData, spec: Stacked) -> Bars | None:
    """The parts that a run has, averaged over neighbouring records where there are many."""
    columns = {name: run.columns[column] for column, name, _ in spec.parts if run.has(column)}
    if not columns:
        return None
    there_S = np.isfinite(np.array(list(columns.values()))).all(axis=0)
    steps = run.steps_S[there_S]
    if not len(steps):
        return None
    apart = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
    starts = np.arange(0, len(steps), -(-len(steps) // _BARS))
    sizes = np.diff(starts, append=len(steps))
    parts = {
        name: np.add.reduceat(values_S[there_S], starts) / sizes
        for name, values_S in columns.items()
    }
    middles = np.add.reduceat(steps, starts) / sizes
    return Bars(run.name, middles, float(sizes[0]) * apart, parts)


def _prompts(runs: Sequence[RunData]) -> Picture:
    groups, words = [], []
    for run in runs:
        if run.solved is None:
            continue
        parts = {"first third": 100 * run.solved.early, "last third": 100 * run.solved.late}
        groups.append(Bars(run.name, np.arange(float(len(BINS))), 0.8, parts))
        shares = [
            f"{when} {', '.join(f'{b} {v:.0f} %' for b, v in zip(BINS, values, strict=True))}"
            for when, values in parts.items()
        ]
        words.append(f"{run.name}, {run.solved.prompts} prompts each: {'; '.join(shares)}")
    labels = ("right completions of the prompt", "% of prompts")
    return Picture(
        "prompts",
        "How often prompts are solved, early and late",
        texts.PROMPTS,
        f"Bars: {'. '.join(words)}",
        draw_groups(groups, ticks=BINS, labels=labels) if groups else b"",
        "a recording (record_rollouts) in the folder of the run",
        tuple(run.name for run in runs if run.solved is None),
    )
