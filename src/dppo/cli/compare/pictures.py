"""Pictures of a comparison: reward against time and steps, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dppo.cli.compare.methods import BASELINE
from dppo.errors import ConfigurationError

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
"""Told apart by colour-blind readers (Okabe and Ito)."""
PHASE_COLOURS = {"rollout": "#56B4E9", "score": "#009E73", "prune": "#D55E00", "train": "#E69F00"}


def pyplot() -> Any:
    """matplotlib, drawing to files.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigurationError(
            "dppo compare draws with matplotlib, which is not installed: pip install matplotlib"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def draw(rows: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw all.

    Args:
        rows: From `analysis.analyse`.
        folder: Where the PNG files go.

    Returns:
        The files.
    """
    plt = pyplot()
    paths = [folder / "reward.png", folder / "phases.png"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, key, unit in zip(
        axes, ("seconds", "step"), ("seconds of training", "steps"), strict=True
    ):
        for number, (name, row) in enumerate(rows.items()):
            colour, curve = COLOURS[number % len(COLOURS)], row["curve"]
            line = "-" if number < len(COLOURS) else "--"
            axis.plot(curve[key], curve["reward"], line, color=colour, label=name, linewidth=1.6)
            if name in {BASELINE, "dppo"}:
                axis.fill_between(
                    *(curve[key], curve["low"], curve["high"]), color=colour, alpha=0.12
                )
        goal = rows[BASELINE].get("to_target", {}).get("target")
        if goal is not None:
            axis.axhline(goal, color="grey", linewidth=0.8, linestyle=":")
        axis.set_xlabel(unit)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("held-out reward, mean over seeds")
    axes[1].legend(fontsize="small", ncols=2)
    figure.tight_layout()
    figure.savefig(paths[0], dpi=130)
    plt.close(figure)
    _draw_phases(plt, rows, paths[1])
    return paths


def _draw_phases(plt: Any, rows: Mapping[str, Any], path: Path) -> None:
    names = list(rows)[::-1]
    figure, axis = plt.subplots(figsize=(7, 0.6 + 0.36 * len(names)))
    left = [0.0] * len(names)
    for phase, colour in PHASE_COLOURS.items():
        widths = [rows[name]["phases"][phase] or 0.0 for name in names]
        axis.barh(names, widths, left=left, color=colour, label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_xlabel("seconds of an optimizer step")
    axis.legend(fontsize="small", ncols=len(PHASE_COLOURS), loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
