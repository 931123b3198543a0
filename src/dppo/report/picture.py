"""A picture with its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dppo.report.curves import Line
from dppo.report.derived import moving_average


@dataclass(frozen=True)
class Picture:
    """A picture with its words.

    Attributes:
        key: Name of its file.
        title: Above it.
        caption: Below it.
        alt: For those who cannot see it.
        png: The picture; empty if no run can be drawn.
        needs: What a run must have recorded to be drawn.
        without: Names of the runs that have not.
    """

    key: str
    title: str
    caption: str
    alt: str
    png: bytes
    needs: str
    without: tuple[str, ...]


def averaged(window: int) -> str:
    """What a caption says about the moving average."""
    if window == 1:
        return ""
    return f"Faint: each record; solid: the mean of the last {window} records."


def curves_in_words(
    lines: Sequence[Line], runs: Sequence[str], series: Sequence[str], *, window: int
) -> str:
    """Where each curve begins and ends, for those who cannot see it."""
    words = []
    for line in lines:
        y = line.y if line.points else moving_average(line.y, window)
        name = f"{runs[line.run]}, {series[line.series]}"
        words.append(f"{name} from {y[0]:.3g} to {y[-1]:.3g}")
    return "; ".join(words) + "."


def needed(column: str) -> str:
    """The metrics that a derived column is made of."""
    if column.startswith("count/"):
        return "dppo/dropped/*"
    return "dppo/dropped/* or frac_reward_zero_std" if column.startswith("share/") else column
