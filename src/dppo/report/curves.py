"""Draws curves: a colour for each run, dashes for each series."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dppo.report.canvas import COLOURS, add_legend, as_png, new_figure, short, whole_numbers
from dppo.report.derived import moving_average

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
_DASHES = ("-", "--", ":", "-.")
_MARKERS = ("", "o", "s", "^")


@dataclass(frozen=True, eq=False)
class Line:
    """A curve: of a run, which gives its colour, and of a series, which gives its dashes.

    Attributes:
        run: Index of the run.
        series: Index of the series.
        x: Places.
        y: Values, all finite.
        points: Whether they are single measurements, not a curve.
    """

    run: int
    series: int
    x: Floats
    y: Floats
    points: bool = False


def draw_lines(
    lines: Sequence[Line],
    *,
    runs: Sequence[str],
    series: Sequence[str],
    labels: tuple[str, str],
    window: int,
    floor: bool,
) -> bytes:
    """Curves; faint raw values behind a moving average where the window is more than 1.

    Args:
        lines: The curves.
        runs: Names of all runs.
        series: Names of the series.
        labels: Of the axes.
        window: Records that the average runs over.
        floor: Whether the vertical axis begins at 0.

    Returns:
        A PNG.
    """
    with new_figure() as figure:
        axis = figure.subplots()
        for line in lines:
            _draw_line(axis, line, window=window, alone=len(runs) == 1)
            if window > 1 and not line.points:
                _draw_points(axis, line, alone=len(runs) == 1, crowded=len(lines) > 4)
        axis.set(xlabel=labels[0], ylabel=labels[1])
        if floor:
            axis.set_ylim(0, 1.1 * max(float(line.y.max()) for line in lines) or 1)
        whole_numbers(axis)
        add_legend(figure, *_keys(axis, lines, runs=runs, series=series))
        return as_png(figure)


def _colour(line: Line, *, alone: bool) -> str:
    return COLOURS[(line.series if alone else line.run) % len(COLOURS)]


def _draw_line(axis: Axes, line: Line, *, window: int, alone: bool) -> None:
    colour = _colour(line, alone=alone)
    if line.points:
        axis.plot(line.x, line.y, "D", color=colour, markeredgecolor="black", zorder=3)
        return
    marker = _MARKERS[line.run // len(COLOURS) % len(_MARKERS)]
    if len(line.x) == 1:
        marker = marker or "o"  # a curve of one record would not be seen
    dashes = _DASHES[line.series % len(_DASHES)]
    smooth = moving_average(line.y, window)
    axis.plot(line.x, smooth, dashes, color=colour, linewidth=2, marker=marker, markevery=0.1)


def _draw_points(axis: Axes, line: Line, *, alone: bool, crowded: bool) -> None:
    """Raw values; fainter and smaller where there are many."""
    alpha, size = (0.12 if crowded else 0.35), (5 if len(line.x) < 100 else 3)
    colour = _colour(line, alone=alone)
    axis.plot(line.x, line.y, ".", color=colour, alpha=alpha, markersize=size, zorder=1)


def _keys(
    axis: Axes, lines: Sequence[Line], *, runs: Sequence[str], series: Sequence[str]
) -> tuple[list[Any], list[str]]:
    """Legend: colours for runs and dashes for series, each where there are several."""
    handles, names, alone = [], [], len(runs) == 1
    for run in sorted({line.run for line in lines}) if not alone else []:
        style = {"color": COLOURS[run % len(COLOURS)], "linewidth": 3}
        marker = _MARKERS[run // len(COLOURS) % len(_MARKERS)]
        handles.append(axis.plot([], [], marker=marker, **style)[0])
        names.append(short(runs)[run])
    kinds = {line.series: line.points for line in lines}
    for index in sorted(kinds) if set(kinds) != {0} else []:
        colour = COLOURS[index % len(COLOURS)] if alone else "#444444"
        look: dict[str, Any] = {"marker": "D" if kinds[index] else ""}
        dashes = "" if kinds[index] else _DASHES[index % len(_DASHES)]
        handles.append(axis.plot([], [], color=colour, linestyle=dashes, linewidth=2, **look)[0])
        names.append(series[index])
    return handles, names
