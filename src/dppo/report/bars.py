"""Draws bars: stacked over steps, or side by side in categories; a panel for each run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dppo.report.canvas import (
    COLOURS,
    GREY,
    HEIGHT,
    add_legend,
    as_png,
    new_figure,
    short,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
_PANEL, _SMALL_PANEL = 2.5, 1.8  # inches


@dataclass(frozen=True, eq=False)
class Bars:
    """Bars of a run: stacked over steps, or side by side in categories.

    Attributes:
        name: Of the run.
        x: Middles of the bars.
        width: Of each.
        parts: Heights, by what they are.
    """

    name: str
    x: Floats
    width: float
    parts: Mapping[str, Floats]


def draw_stacks(stacks: Sequence[Bars], *, colours: Mapping[str, str], ylabel: str) -> bytes:
    """Stacked bars over steps, a panel for each run.

    Args:
        stacks: The runs.
        colours: By part, in the order of the stack, from below.
        ylabel: Of the vertical axis.

    Returns:
        A PNG.
    """

    def draw(axis: Axes, bars: Bars) -> None:
        below = np.zeros(len(bars.x))
        for part in (name for name in colours if name in bars.parts):
            options = {"color": colours[part], "linewidth": 0, "label": part}
            axis.bar(bars.x, bars.parts[part], bars.width, bottom=below, **options)
            below = below + bars.parts[part]
        axis.margins(x=0.01)
        whole_numbers(axis)

    return _panels(stacks, draw, labels=("optimizer step", ylabel))


def draw_groups(groups: Sequence[Bars], *, ticks: Sequence[str], labels: tuple[str, str]) -> bytes:
    """Bars side by side in categories, a panel for each run.

    Args:
        groups: The runs.
        ticks: Names of the categories.
        labels: Of the axes.

    Returns:
        A PNG.
    """

    def draw(axis: Axes, bars: Bars) -> None:
        each = bars.width / len(bars.parts)
        for i, (part, values) in enumerate(bars.parts.items()):
            place = bars.x + (i - (len(bars.parts) - 1) / 2) * each
            axis.bar(place, values, each, color=(GREY, COLOURS[0])[i % 2], label=part)
        axis.set_xticks(bars.x, ticks, fontsize=12)

    return _panels(groups, draw, labels=labels)


def _panels(
    bars: Sequence[Bars], draw: Callable[[Axes, Bars], None], *, labels: tuple[str, str]
) -> bytes:
    each = _PANEL if len(bars) <= 4 else _SMALL_PANEL
    with new_figure(max(HEIGHT, 0.9 + each * len(bars))) as figure:
        axes = figure.subplots(len(bars), 1, squeeze=False, sharey=True)[:, 0]
        for axis, one, name in zip(axes, bars, short([b.name for b in bars]), strict=True):
            draw(axis, one)
            if len(bars) > 1:
                axis.set_title(name)
            else:
                axis.set_ylabel(labels[1])
        if len(bars) > 1:
            figure.supylabel(labels[1], fontsize="medium")
        axes[-1].set_xlabel(labels[0])
        keys: dict[str, Any] = {}
        for axis in axes:
            for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
                keys.setdefault(name, handle)
        add_legend(figure, list(keys.values()), list(keys))
        return as_png(figure)
